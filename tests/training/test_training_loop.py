import os
import signal
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from tiny_training import final_bytes, tiny_config, write_store

from dit_repro.diffusion import NoiseSchedule, Objective
from dit_repro.latents import LatentStore
from dit_repro.training import RunFolder, TrainConfig, Trainer, loss_by_timestep
from dit_repro.training.batches import draw_batch
from dit_repro.training.state import build_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run of `config`, never interrupted."""
    path = tmp_path_factory.mktemp("whole")
    Trainer(tiny_config(write_store(path / "latents")), path / "run").run()
    return path / "run"


class Dies(Trainer):
    """Stops short at a step, before (1) or after (2) it has changed the weights."""
    at = (0, 1)

    def _step(self, batch):
        step, when = self.at
        if self.state.step + 1 == step and when == 1:
            raise KeyboardInterrupt
        super()._step(batch)
        if self.state.step + 1 == step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("step", [1, 4, 5, 7, 9, 12])
def test_resumed_run_ends_with_the_same_bytes(config, tmp_path, whole, step):
    killed = Dies(config, tmp_path / "killed")
    for killed.at in ((step, 1), (step, 2)):
        with pytest.raises(KeyboardInterrupt):
            killed.run()
    assert Trainer(config, tmp_path / "killed").run() == "finished"
    assert final_bytes(tmp_path / "killed") == final_bytes(whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_stop_signal_finishes_the_step_saves_and_says_resume_me(config, tmp_path, whole, number):
    class Signaled(Trainer):
        def _step(self, batch):
            super()._step(batch)
            if self.state.step + 1 == 5:   # in the middle of a window
                os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    folder = RunFolder(tmp_path / "run")
    assert Signaled(config, folder.path).run() == "interrupted"
    assert (folder.status()["state"], folder.status()["step"], folder.checkpoints()) == ("interrupted", 5, [4, 5])
    assert signal.getsignal(number) == before
    assert Trainer(config, folder.path).run() == "finished"
    assert final_bytes(folder.path) == final_bytes(whole)


def test_a_run_made_longer_ends_as_if_it_had_been_long_from_the_start(config, tmp_path, whole):
    Trainer(replace(config, num_steps=8), tmp_path / "longer").run()
    Trainer(config, tmp_path / "longer").run()
    assert final_bytes(tmp_path / "longer") == final_bytes(whole)
    config_before = (tmp_path / "longer/config.json").read_bytes()
    assert Trainer(replace(config, num_steps=8), tmp_path / "longer").run() == "finished"   # an archive is all it needs
    with pytest.raises(ValueError, match=r"already at step 12, past num_steps = 6.*Ask for one of 8, 12"):
        Trainer(replace(config, num_steps=6), tmp_path / "longer").run()
    assert final_bytes(tmp_path / "longer") == final_bytes(whole)
    assert (tmp_path / "longer/config.json").read_bytes() == config_before


def losses(config, folder):
    if not folder.exists():
        Trainer(config, folder).run()
    return RunFolder(folder).metrics()[["loss", "mse", "vb", "grad_norm"]].to_numpy()


def test_four_micro_batches_give_the_losses_of_one_batch_for_50_steps(latents, tmp_path):
    config = tiny_config(latents, num_steps=50, log_every=1, checkpoint_every=50, archive_every=0, learning_rate=1e-3)
    whole = losses(config, tmp_path / "whole")
    cut = losses(replace(config, micro_batch_size=2), tmp_path / "cut")
    uneven = losses(replace(config, micro_batch_size=3), tmp_path / "uneven")
    assert len(whole) == 50
    np.testing.assert_allclose(cut, whole, rtol=0, atol=1e-5)
    np.testing.assert_allclose(uneven, whole, rtol=0, atol=1e-5)


def test_activation_checkpointing_changes_no_loss(config, tmp_path, whole):
    less = losses(replace(config, activation_checkpointing=True), tmp_path / "less")
    np.testing.assert_allclose(less, losses(config, whole), atol=1e-6)


@pytest.mark.parametrize(("precision", "tolerance"), [("tf32", 1e-6), ("bf16", 0.03), ("fp16", 0.01)])
def test_lower_precision_trains_to_nearly_the_same_losses(config, tmp_path, whole, precision, tolerance):
    before = torch.get_float32_matmul_precision()
    low = losses(replace(config, precision=precision, clip_norm=1e3), tmp_path / precision)
    np.testing.assert_allclose(low, losses(config, whole), rtol=tolerance)   # the gradient norms too: unscaled first
    assert precision == "tf32" or np.abs(low - losses(config, whole)).max() > 0
    assert torch.get_float32_matmul_precision() == before


def test_fp16_overflows_are_skipped_counted_and_not_an_alarm(config, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**36))
    config = replace(config, precision="fp16", num_steps=30, log_every=30, checkpoint_every=30, archive_every=0)
    Trainer(config, tmp_path / "run").run()
    row = RunFolder(tmp_path / "run").metrics().iloc[0]
    assert 5 < row["skipped_steps"] <= 20 and row["loss_scale"] == 2.0 ** (36 - row["skipped_steps"])
    assert np.isfinite(row["grad_norm_max"])


def test_fp16_that_skips_most_steps_raises_an_alarm(config, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**100))
    with pytest.raises(RuntimeError, match="22 more steps were skipped than taken"):
        Trainer(replace(config, precision="fp16", num_steps=24), tmp_path / "run").run()


def test_clipping_bounds_what_the_optimizer_sees_and_not_what_is_reported(config, tmp_path, monkeypatch):
    seen, step = [], torch.optim.AdamW.step

    def spy(self, *args, **kwargs):
        seen.append(float(torch.cat([p.grad.flatten() for g in self.param_groups for p in g["params"]]).norm()))
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    Trainer(replace(config, clip_norm=0.01), tmp_path / "run").run()
    np.testing.assert_allclose(seen, 0.01, rtol=1e-4)
    assert RunFolder(tmp_path / "run").metrics()["grad_norm"].min() > 0.05


def test_metrics_are_those_of_the_batches_the_run_was_given(config, tmp_path):
    # Two steps at a learning rate too small to move anything: the untouched model predicts exactly zero.
    config = replace(config, learning_rate=1e-12, num_steps=2, checkpoint_every=2, archive_every=0)
    Trainer(config, tmp_path / "run").run()
    row = RunFolder(tmp_path / "run").metrics().iloc[0]
    batches = [draw_batch(config, LatentStore.open(config.latents), step) for step in (1, 2)]
    noise, t, y = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("noise", "t", "y"))
    mse = noise.double().square().mean((1, 2, 3))
    assert row["mse"] == pytest.approx(float(mse.mean()), rel=1e-6) and row["images"] == 16
    assert row["mse_error"] == pytest.approx(float(mse.std(correction=0)) / 4, rel=1e-4)
    assert row["loss"] == pytest.approx(row["mse"] + row["vb"], rel=1e-6) and row["weight"] == 1
    for quarter in range(4):
        inside = mse[(t >= 250 * quarter) & (t < 250 * (quarter + 1))]
        assert row[f"mse_quarter_{quarter + 1}"] == pytest.approx(float(inside.mean()), rel=1e-6)
    expected = [pytest.approx(float(mse[y == c].mean()), rel=1e-4) if (y == c).any() else None for c in range(4)]
    assert row["mse_by_class"] == expected
    assert 0 < row["update_norm"] < 1e-9 and row["ema_distance"] < 1e-9


def test_update_norm_and_ema_distance_are_those_of_the_weights(config, tmp_path):
    Trainer(replace(config, num_steps=1, log_every=1, checkpoint_every=1, archive_every=0), tmp_path / "run").run()
    folder = RunFolder(tmp_path / "run")
    initial, raw = (torch.cat([p.detach().flatten() for p in m.parameters()])
                    for m in (build_model(config), folder.load_model(ema=False)))
    row = folder.metrics().iloc[0]
    assert row["update_norm"] == pytest.approx(float((raw - initial).norm()), rel=1e-5)
    assert row["ema_distance"] == pytest.approx(float(0.9 * (raw - initial).norm() / raw.norm()), rel=1e-4)


def test_previews_see_eval_mode_raw_and_ema_weights_and_leave_no_trace(config, tmp_path, whole):
    seen = []

    def preview(model, path):
        torch.rand(5)
        assert not model.training and not torch.is_grad_enabled()
        seen.append((path.name, model.final_layer.linear.weight.clone()))

    torch.manual_seed(5)
    before = torch.get_rng_state()
    Trainer(replace(config, preview_every=4), tmp_path / "seen", preview).run()
    assert torch.equal(torch.get_rng_state(), before)
    assert final_bytes(tmp_path / "seen") == final_bytes(whole)
    assert [name for name, _ in seen] == [f"{s:08d}-{kind}" for s in (4, 8, 12) for kind in ("raw", "ema")]
    folder = RunFolder(tmp_path / "seen")
    for (_, weight), ema in zip(seen[-2:], (False, True)):
        assert torch.equal(weight, folder.load_model(12, ema).final_layer.linear.weight)
    with pytest.raises(ValueError, match="preview_every = 4"):
        Trainer(replace(config, preview_every=4), tmp_path / "none")


def test_recipes_differ_in_declared_settings_only(config, tmp_path):
    objective = Objective(learn_sigma=False, min_snr_gamma=5.0)
    Trainer(replace(config, schedule="cosine", objective=objective, init="pytorch"), tmp_path / "run").run()
    row = RunFolder(tmp_path / "run").metrics().iloc[-1]
    assert row["vb"] == 0 and row["weight"] < 1 and row["loss"] < row["mse"]
    assert RunFolder(tmp_path / "run").load_model().out_channels == 4


def test_settings_that_do_not_fit_the_latents_are_refused_and_do_not_claim_the_folder(config, tmp_path):
    for change, named in (({"num_classes": 10}, "3 classes"), ({"input_size": 16}, r"\(4, 8, 8\)")):
        with pytest.raises(ValueError, match=named):
            Trainer(replace(config, **change), tmp_path / "run").run()
        assert RunFolder(tmp_path / "run").status()["state"] == "failed"
    assert Trainer(config, tmp_path / "run").run() == "finished"


def test_loss_by_timestep_repeats_itself_and_falls_with_training(latents, tmp_path):
    config = TrainConfig.from_json(tiny_config(latents, num_steps=60, learning_rate=3e-3).to_json())
    Trainer(config, tmp_path / "run").run()
    store, schedule = LatentStore.open(latents), NoiseSchedule.linear(1000)
    x0 = store.moments(np.arange(40), np.zeros(40, bool))[:, :4]
    labels = torch.as_tensor(store.labels)
    model = RunFolder(tmp_path / "run").load_model(ema=False).train()
    trained = loss_by_timestep(model, x0, labels, schedule, [10, 500, 900], seed=3)
    assert trained.shape == (3, 40) and model.training
    again = loss_by_timestep(model, x0, labels, schedule, [900, 10], seed=3, batch_size=7)
    torch.testing.assert_close(again, trained[[2, 0]])
    initial = loss_by_timestep(build_model(config), x0, labels, schedule, [10, 500, 900], seed=3)
    assert initial.mean(1).tolist() == pytest.approx([1, 1, 1], abs=0.05)   # it predicts zero, the noise has variance 1
    assert trained[2].mean() < 0.8 * initial[2].mean()
