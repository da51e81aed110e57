import json
import shutil
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_training import final_bytes, tiny_config, write_store

from dit_repro.diffusion import Objective
from dit_repro.models import create_model
from dit_repro.profiles import get_profile
from dit_repro.training import RunFolder, Trainer, launch
from dit_repro.training.checkpoints import (
    DamagedCheckpoint,
    checkpoint_path,
    read_checkpoint,
    remove_stale,
    write_checkpoint,
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("finished")
    Trainer(tiny_config(write_store(path / "latents")), path / "run").run()
    return RunFolder(path / "run")


@pytest.fixture
def run(finished, tmp_path):
    """A copy of the finished run, with checkpoints of steps 8 and 12."""
    return RunFolder(shutil.copytree(finished.path, tmp_path / "run"))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "step-00000003.safetensors"
    write_checkpoint(path, {"model.w": torch.arange(6.0), "ema.w": torch.ones(2, 3), "monitor.a": torch.tensor([True]),
                            "optimizer.step": torch.tensor(3.0)}, {"step": 3, "text": "a\"b"})
    return path


def test_a_checkpoint_reads_back_as_it_was_written(small):
    tensors, scalars = read_checkpoint(small)
    assert scalars == {"step": 3, "text": "a\"b"} and torch.equal(tensors["model.w"], torch.arange(6.0))
    assert {name: (t.shape, t.dtype) for name, t in tensors.items()}["monitor.a"] == ((1,), torch.bool)
    only, _ = read_checkpoint(small, ("ema",))
    assert list(only) == ["ema.w"] and load_file(small).keys() == tensors.keys()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_cut_or_altered_file_is_never_taken_for_a_good_one(small, tmp_path_factory, data):
    good, path = small.read_bytes(), tmp_path_factory.mktemp("bad") / small.name
    if data.draw(st.booleans(), label="cut"):
        bad = good[:data.draw(st.integers(0, len(good) - 1))]
    else:
        at = data.draw(st.integers(0, len(good) - 1))
        bad = good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1:]
    path.write_bytes(bad)
    try:
        tensors, scalars = read_checkpoint(path)
    except DamagedCheckpoint as error:
        assert str(path) in str(error)
    else:   # a changed blank between the header's words, say
        expected, _ = read_checkpoint(small)
        assert scalars["step"] == 3 and all(torch.equal(tensors[name], expected[name]) for name in expected)


@pytest.mark.parametrize("damage", ["cut", "altered"])
def test_resuming_uses_the_checkpoint_before_a_damaged_one_and_says_so(run, finished, capsys, damage):
    path = checkpoint_path(run.checkpoint_folder, "step", 12)
    content = path.read_bytes()
    path.write_bytes(content[:-100] if damage == "cut" else content[:-100] + b"x" + content[-99:])
    assert [str(path) in (problem or "") for _, problem in run.verify()] == [False, True]
    assert Trainer(run.config(), run.path).run() == "finished"
    assert "WARNING" in (said := capsys.readouterr().err) and str(path) in said
    event, = (event for event in run.events() if event["event"] == "damaged_checkpoint")
    assert (event["step"], event["used_instead"]) == (12, 8)
    assert final_bytes(run.path) == final_bytes(finished.path)
    assert path.with_suffix(".damaged").exists()


def test_a_run_with_only_damaged_checkpoints_is_not_started_over(run):
    for path, _ in run.verify():
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RuntimeError, match=r"every checkpoint of .* is damaged"):
        Trainer(run.config(), run.path).run()


def test_retention_keeps_the_last_the_archives_and_the_pinned(tmp_path):
    for step in range(10, 101, 10):
        checkpoint_path(tmp_path, "step", step).touch()
    checkpoint_path(tmp_path, "alarm", 15).touch()
    remove_stale(tmp_path, keep_last=2, archive_every=40, pinned={20})
    kept = sorted(path.name for path in tmp_path.glob("*"))
    assert kept == ["alarm-00000015.safetensors", *(f"step-{step:08d}.safetensors" for step in (20, 40, 80, 90, 100))]


def test_too_little_space_is_found_before_writing_and_before_training(config, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Mock(free=1000))
    with pytest.raises(RuntimeError, match=r"0\.0 MB free, a checkpoint needs"):
        Trainer(config, tmp_path / "run").run()
    assert not (tmp_path / "run/metrics.jsonl").exists() and not list((tmp_path / "run/checkpoints").glob("*"))


def test_load_model_gives_ema_or_raw_weights_in_eval_mode(run):
    tensors, _ = read_checkpoint(checkpoint_path(run.checkpoint_folder, "step", 8))
    for ema, section in ((True, "ema"), (False, "model")):
        model = run.load_model(8, ema)
        assert not model.training
        assert all(torch.equal(weight, tensors[f"{section}.{name}"]) for name, weight in model.state_dict().items())
    assert torch.equal(run.load_model().pos_embed, run.load_model(12).pos_embed)
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 5; it has 8, 12"):
        run.load_model(5)


def test_exported_ema_has_the_released_layout_and_outlives_its_checkpoint(run, tmp_path):
    path = run.export_ema(8)
    model = create_model("DiT-test/4", input_size=8, num_classes=3)
    model.load_state_dict(load_file(path))
    ema = run.load_model(8).state_dict()
    assert all(torch.equal(weight, ema[name]) for name, weight in model.state_dict().items())
    checkpoint_path(run.checkpoint_folder, "step", 8).unlink()
    assert torch.equal(run.load_model(8).pos_embed, model.pos_embed) and run.checkpoints("ema") == [8]
    assert run.export_ema(12, tmp_path / "else.safetensors").is_file()


def test_ema_exports_come_as_often_as_asked(config, tmp_path):
    Trainer(replace(config, export_ema_every=4, keep_last=1), tmp_path / "run").run()
    assert RunFolder(tmp_path / "run").checkpoints("ema") == [4, 8, 12]


def test_a_folder_of_another_run_is_refused_and_the_differences_are_named(run):
    with pytest.raises(ValueError, match=r"seed is 0, asked for 7; learning_rate is 0\.01, asked for 0\.02"):
        Trainer(replace(run.config(), seed=7, learning_rate=0.02), run.path).run()
    assert run.status()["state"] == "finished"


def test_other_latents_under_the_same_settings_are_refused(run, tmp_path):
    moved = write_store(tmp_path / "moved")
    assert Trainer(replace(run.config(), latents=str(moved)), run.path).run() == "finished"
    other = write_store(tmp_path / "other", num_images=41)
    before = (run.path / "config.json").read_bytes()
    for num_steps in (8, 12, 16):   # past them, finished, to be gone on with
        asked = replace(run.config(), latents=str(other), num_steps=num_steps)
        for start in (lambda asked=asked: Trainer(asked, run.path).run(), lambda asked=asked: launch(asked, run.path)):
            with pytest.raises(ValueError, match=r"trained with other latents than .*other holds \(checksum"):
                start()
    assert (run.path / "config.json").read_bytes() == before and run.config().latents == str(moved)


def test_a_run_that_moved_with_its_latents_goes_on_and_one_without_them_is_still_read(run, tmp_path):
    latents, config = write_store(tmp_path / "latents"), run.config()
    folder = RunFolder(shutil.move(run.path, tmp_path / "elsewhere"))
    asked = replace(config, latents=str(latents), num_steps=16)
    assert Trainer(asked, folder.path).run() == "finished" and folder.config() == asked
    checkpoint_path(folder.checkpoint_folder, "step", 16).write_bytes(b"damaged")   # the one before it is asked then
    assert Trainer(asked, folder.path).run() == "finished" and folder.checkpoints()[-1] == 16
    shutil.rmtree(latents)
    assert launch(asked, folder.path).load_model() and launch(replace(asked, num_steps=8), folder.path).load_model()
    with pytest.raises(FileNotFoundError, match="no latent store"):
        launch(replace(asked, latents=str(tmp_path / "nowhere")), folder.path)


def test_runs_on_other_latents_have_other_folders_in_the_workspace(config, tmp_path, monkeypatch):
    monkeypatch.setenv("DIT_REPRO_WORKSPACE", str(tmp_path))
    stores = {name: write_store(tmp_path / name, n) for name, n in (("first", 40), ("moved", 40), ("other", 41))}
    settings = get_profile("smoke")
    paths = {name: settings.run_path("run", replace(config, latents=str(path))) for name, path in stores.items()}
    assert paths["first"] == paths["moved"] != paths["other"] and paths["first"].parent == tmp_path / "runs"
    assert settings.run_path("run", replace(config, seed=1)) not in paths.values()
    with pytest.raises(FileNotFoundError, match="no latent store"):
        settings.run_path("run", replace(config, latents=str(tmp_path / "nowhere")))


def test_a_damaged_line_is_named_and_one_being_written_is_not(run):
    file = run.path / "metrics.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"step": 14, "ms')
    assert len(run.metrics()) == len(whole.splitlines())
    lines = whole.splitlines(keepends=True)
    for damage in (b'{"step": 4, "m\n', b"\xff\x00\n", b"\n"):
        file.write_bytes(b"".join([lines[0], damage, *lines[2:]]))
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: expected one JSON value.*Delete the line"):
            run.metrics()


def test_two_runs_cannot_share_a_folder(run):
    assert not run.is_locked()
    with run.writing(run.config()):
        assert run.is_locked()
        with pytest.raises(RuntimeError, match=r"is in use by process \d+ on "):
            Trainer(run.config(), run.path).run()
    assert not run.is_locked()


def test_a_finished_run_trains_no_further(run, finished):
    assert Trainer(run.config(), run.path).run() == "finished"
    assert final_bytes(run.path) == final_bytes(finished.path) and run.checkpoints() == [8, 12]


def test_a_killed_process_leaves_a_run_that_says_interrupted_and_no_torn_line(run):
    status = json.loads((run.path / "status.json").read_text())
    (run.path / "status.json").write_text(json.dumps({**status, "state": "running"}))
    assert run.status()["state"] == "interrupted"
    for name in ("metrics.jsonl", "events.jsonl"):
        with open(run.path / name, "a") as file:
            file.write('{"step": 14, "ev')
    (run.checkpoint_folder / "step-00000016.123.tmp").touch()
    assert len(run.metrics()) == 6
    with run.writing(run.config()):
        run.cut_metrics(12)
        run.add_metrics({"step": 14, "mse": float("nan")})
        run.add_event("test", 14)
    assert run.metrics()["step"].tolist()[-2:] == [12, 14] and run.metrics()["mse"].isna().tolist()[-1]
    assert run.events()[-1]["event"] == "test" and not list(run.checkpoint_folder.glob("*.tmp"))


def test_a_fork_goes_on_from_a_checkpoint_with_other_settings_and_the_same_draws(run, tmp_path):
    same = run.fork(tmp_path / "same", 8)
    Trainer(same.config(), same.path).run()
    assert final_bytes(same.path)[0] == final_bytes(run.path)[0]
    clipped = run.fork(tmp_path / "clipped", 8, clip_norm=0.01)
    Trainer(clipped.config(), clipped.path).run()
    ours, theirs = (r.metrics().set_index("step").loc[10] for r in (clipped, run))
    assert ours["grad_norm"] != theirs["grad_norm"] and ours["mse"] == pytest.approx(theirs["mse"], rel=0.02)


def test_a_fork_asked_for_again_goes_on_and_anything_else_there_is_refused(run, tmp_path):
    forked = run.fork(tmp_path / "fork", 8, learning_rate=0.02)
    Trainer(forked.config(), forked.path).run()
    before = final_bytes(forked.path)
    again = run.fork(tmp_path / "fork", 8, learning_rate=0.02)
    assert again.checkpoints() == forked.checkpoints() and Trainer(again.config(), again.path).run() == "finished"
    assert final_bytes(forked.path) == before
    longer = run.fork(tmp_path / "fork", 8, learning_rate=0.02, num_steps=16)   # the same run may be made longer
    Trainer(longer.config(), longer.path).run()
    assert longer.metrics()["step"].tolist() == [10, 12, 14, 16]
    with pytest.raises(ValueError, match="past num_steps = 10"):
        run.fork(tmp_path / "fork", 8, learning_rate=0.02, num_steps=10)
    with pytest.raises(ValueError, match=r"learning_rate is 0\.02, asked for 0\.03"):
        run.fork(tmp_path / "fork", 8, learning_rate=0.03)
    with pytest.raises(ValueError, match=r"not forked from .*step-00000008"):
        longer.fork(run.path, 8)
    with pytest.raises(ValueError, match=r"not forked from .*step-00000012"):
        run.fork(tmp_path / "fork", 12, learning_rate=0.02, num_steps=16)
    with pytest.raises(ValueError, match="num_steps = 12: a fork from step 12 has to end after it"):
        run.fork(tmp_path / "end", 12)
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 5; it has 8, 12"):
        run.fork(tmp_path / "none", 5)
    assert not (tmp_path / "none").exists() and not (tmp_path / "end").exists()


@pytest.mark.parametrize("changes", [{"clip_norm": 0.01}, {"learning_rate": 1e-4}, {"betas": (0.5, 0.9)},
                                     {"weight_decay": 0.5}, {"schedule": "cosine"},
                                     {"objective": Objective(min_snr_gamma=5.0)}, {"precision": "bf16"}], ids=str)
def test_a_fork_trains_with_the_new_setting_from_the_old_state(run, tmp_path, changes):
    seen = {}

    class Watched(Trainer):
        def _step(self, batch):
            state, group = self.state, self.state.optimizer.param_groups[0]
            seen.setdefault(state.step, (batch, {name: group[name] for name in ("lr", "betas", "weight_decay")},
                                         torch.cat([p.detach().flatten().clone() for p in state.trained.values()])))
            super()._step(batch)

    def first_step(folder):
        seen.clear()
        Watched(folder.config(), folder.path).run()
        return seen[8]

    old, new = (first_step(run.fork(tmp_path / name, 8, **given)) for name, given in (("old", {}), ("new", changes)))
    assert all(torch.equal(a, b) for a, b in zip(vars(old[0]).values(), vars(new[0]).values()))   # the same draws
    assert torch.equal(old[2], new[2])
    config = RunFolder(tmp_path / "new").config()
    assert new[1] == {"lr": config.learning_rate, "betas": config.betas, "weight_decay": config.weight_decay}
    assert final_bytes(tmp_path / "old")[0] == final_bytes(run.path)[0]
    ends = [RunFolder(tmp_path / name).load_model(12, ema=False).state_dict() for name in ("old", "new")]
    assert not torch.equal(*(end["blocks.0.mlp.fc1.weight"] for end in ends))


def test_a_folder_without_a_run_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        RunFolder(tmp_path / "nothing").config()
    assert RunFolder(tmp_path / "nothing").status() == {"state": "new", "step": 0}
