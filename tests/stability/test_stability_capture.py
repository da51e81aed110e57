import numpy as np
import pytest
import torch
from click.testing import CliRunner

from dit_repro.cli import main
from dit_repro.diffusion import Objective
from dit_repro.latents import LatentStore
from dit_repro.stability import Capture, capture_step, replay
from dit_repro.stability.capture import draw
from dit_repro.training.batches import draw_batch
from dit_repro.training.checkpoints import DamagedCheckpoint, checkpoint_path, read_checkpoint


@pytest.mark.parametrize("settings", [
    {}, {"clip_norm": 0.05, "micro_batch_size": 3, "weight_decay": 0.1}, {"precision": "bf16"}, {"precision": "fp16"},
    {"schedule": "cosine", "objective": Objective(learn_sigma=False), "init": "pytorch", "betas": (0.8, 0.95)},
    {"objective": Objective(min_snr_gamma=5.0, noise_offset=0.1, input_perturbation=0.1), "ema_warmup": True},
], ids=str)
def test_captured_step_is_the_trainers_step_bit_for_bit(train, settings):
    run = train(**settings)
    capture = capture_step(run, 12)   # from the checkpoint of step 8, over steps 9 to 11
    after, _ = read_checkpoint(checkpoint_path(run.checkpoint_folder, "step", 12))
    for name, before in capture.before.items():
        section, _, rest = name.partition(".")
        if section == "model" and f"update.{rest}" in capture.record:
            torch.testing.assert_close(capture.record[f"update.{rest}"], after[name] - before, rtol=0, atol=0)
        if section == "ema" and f"ema.{rest}" in capture.record:
            torch.testing.assert_close(capture.record[f"ema.{rest}"], after[name] - before, rtol=0, atol=0)
        if name.startswith("optimizer.exp"):
            torch.testing.assert_close(capture.record[name.replace("optimizer", "moment")], after[name], rtol=0, atol=0)
    assert sum(name.startswith("update.") for name in capture.record) > 20


def test_draws_are_those_of_training(tiny_run):
    config, store = tiny_run.config(), LatentStore.open(tiny_run.config().latents)
    drawn, batch = draw(config, len(store), 7, retry=1), draw_batch(config, store, 7, retry=1)
    latents = store.latents(drawn["indices"], drawn["flipped"], drawn["latent_noise"])
    labels = torch.as_tensor(np.asarray(store.labels))[drawn["indices"]].masked_fill(drawn["dropped"], 3)
    for mine, theirs in ((latents, batch.x0), (drawn["t"], batch.t), (labels, batch.y), (drawn["noise"], batch.noise),
                         (drawn["input_noise"], batch.input_noise)):
        assert torch.equal(mine, theirs)


def test_capture_file_gives_the_same_step_again_and_says_when_it_was_altered(tiny_run, tmp_path):
    path = tmp_path / "step.safetensors"
    capture = capture_step(tiny_run, 10, path)
    loaded = Capture.load(path)
    assert loaded.config == capture.config and loaded.record.keys() == capture.record.keys()
    assert (replay(path).difference == 0).all()
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match="altered"):
        Capture.load(path)
    with pytest.raises(ValueError, match="is not a capture"):
        Capture.load(checkpoint_path(tiny_run.checkpoint_folder, "step", 12))


def test_replay_differs_only_behind_the_setting_that_was_changed(tiny_run):
    capture = capture_step(tiny_run, 9)
    clipped = replay(capture, overrides=["clip_norm=0.001"]).groupby("stage", sort=False).difference.max()
    assert (clipped[:"gradients"] == 0).all() and clipped["moments"] > 0.1
    other = replay(capture, overrides=["schedule=cosine"]).groupby("stage", sort=False).difference.max()
    assert (other[:"labels"] == 0).all() and other["coefficients"] > 0.1
    wide, half = (replay(capture, precision).set_index("quantity").difference for precision in ("fp64", "bf16"))
    assert 0 < wide["output"] < 1e-5 < half["output"] < 0.1


def test_capturing_leaves_the_run_as_it_was(tiny_run):
    before = {path: path.stat().st_mtime_ns for path in tiny_run.path.rglob("*")}
    capture_step(tiny_run, 11, fault="velocity target", clip_norm=1.0)
    assert {path: path.stat().st_mtime_ns for path in tiny_run.path.rglob("*")} == before


def test_bad_requests_name_what_was_expected(tiny_run):
    with pytest.raises(ValueError, match="step 13: expected 1 to 12"):
        capture_step(tiny_run, 13)
    with pytest.raises(ValueError, match="unknown fault 'gremlin'; the faults are images"):
        capture_step(tiny_run, 9, fault="gremlin")
    with pytest.raises(ValueError, match="precision 'fp8': expected one of fp64"):
        replay(capture_step(tiny_run, 9), "fp8")


def test_commands_capture_replay_and_localize(tiny_run, tmp_path):
    file = tmp_path / "step.safetensors"
    run = CliRunner().invoke(main, ["stability", "capture", str(tiny_run.path), "--step", "9", "--out", str(file)])
    assert run.exit_code == 0 and file.is_file(), run.output
    again = CliRunner().invoke(main, ["stability", "replay", str(file), "--precision", "bf16", "-o", "clip_norm=0.1"])
    assert again.exit_code == 0 and "clipped" in again.output, again.output
    found = CliRunner().invoke(main, ["stability", "localize", str(file)])
    assert found.exit_code == 0 and "nothing is broken" in found.output, found.output
