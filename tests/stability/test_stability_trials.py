import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from tiny_training import tiny_config, write_store

from dit_repro.diffusion import Objective
from dit_repro.stability.trials import (
    Trial,
    alarms,
    broke,
    losses_after,
    mean_interval,
    outcome,
    probe,
    run_trial,
    run_trials,
)
from dit_repro.training import RunFolder, Trainer
from dit_repro.training.checkpoints import checkpoint_path, read_checkpoint, write_checkpoint


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 12 steps, archived at step 8."""
    folder = tmp_path_factory.mktemp("trials")
    config = tiny_config(write_store(folder / "latents"), log_every=1, ema_decay=0.0, keep_last=3)
    Trainer(config, folder / "run").run()
    return RunFolder(folder / "run"), config, str(checkpoint_path(folder / "run" / "checkpoints", "step", 8))


def test_a_trial_from_a_checkpoint_takes_the_steps_that_the_trainer_took(trained):
    folder, config, start = trained
    lines = run_trial(Trial(replace(config, num_steps=4), start))
    after = folder.metrics().query("step > 8")
    assert lines.step.tolist() == [9, 10, 11, 12]
    for name in ("mse", "grad_norm", "update_norm"):
        assert np.allclose(lines[name], after[name], rtol=1e-4), name


def test_a_trial_has_the_input_noise_and_after_a_roll_back_the_new_draws_of_the_trainer(tmp_path):
    config = tiny_config(write_store(tmp_path / "latents"), log_every=1, keep_last=3,
                         objective=Objective(input_perturbation=0.5))
    folder = RunFolder(tmp_path / "run")
    Trainer(config, folder.path).run()
    start, last = (checkpoint_path(folder.checkpoint_folder, "step", step) for step in (8, 12))
    trial = Trial(replace(config, num_steps=4), str(start))
    first = run_trial(trial).mse
    assert np.allclose(first, folder.metrics().query("step > 8").mse, rtol=1e-4)
    tensors, scalars = read_checkpoint(start)
    write_checkpoint(start, tensors, {**scalars, "retry": 1})
    last.unlink()
    Trainer(config, folder.path).run()
    again = run_trial(trial).mse
    assert np.allclose(again, folder.metrics().query("step > 8").mse, rtol=1e-4) and not np.allclose(first, again)


def test_a_fault_changes_its_own_step_and_no_draw(trained):
    _, config, start = trained
    trial = Trial(replace(config, num_steps=4), start)
    clean, faulty = run_trial(trial), run_trial(replace(trial, fault_step=2, gradient_scale=1000.0))
    assert clean.mse[:2].equals(faulty.mse[:2])
    assert faulty.grad_norm[1] == pytest.approx(1000 * clean.grad_norm[1], rel=1e-5)
    assert faulty.mse[2] != clean.mse[2]


def test_adam_bounds_the_update_of_any_gradient(trained):
    _, config, start = trained
    trial = Trial(replace(config, num_steps=1), start, fault_step=1)
    updates = [run_trial(replace(trial, gradient_scale=scale)).update_norm[0] for scale in (1.0, 1e3, 1e6)]
    size = sum(p.numel() for p in trained[0].load_model().parameters() if p.requires_grad)
    bound = config.learning_rate * 0.1 / 0.001**0.5 * size**0.5   # (1 - beta1) / sqrt(1 - beta2) in each coordinate
    assert updates[0] < updates[1] < 30 * updates[0]
    assert updates[2] == pytest.approx(updates[1], rel=0.05) and updates[2] <= 1.01 * bound


def test_a_skipped_step_leaves_the_weights_alone(trained):
    _, config, start = trained
    lines = run_trial(Trial(replace(config, num_steps=7), start, fault_step=6, gradient_scale=1e4, skip_ratio=100.0))
    assert lines.skipped.tolist() == [False] * 5 + [True, False]
    assert lines.update_norm[5] == 0 and (lines.update_norm.drop(5) > 0).all()


def test_warm_up_begins_at_a_fraction_of_the_rate(trained):
    _, config, start = trained
    plain, slow = (run_trial(Trial(replace(config, num_steps=2), start, warmup_steps=steps)) for steps in (0, 10))
    assert slow.update_norm[0] == pytest.approx(plain.update_norm[0] / 10, rel=1e-3)


def test_normalized_queries_and_keys_bound_the_logits(trained):
    _, config, start = trained
    model = trained[0].load_model()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(100)
    x, t, y = torch.randn(4, 4, 8, 8), torch.full((4,), 500), torch.zeros(4, dtype=torch.int64)
    assert probe(model, x, t, y)["largest_logit"] > 100
    lines = run_trial(Trial(replace(config, num_steps=1), start, qk_norm=True))
    assert lines.largest_logit[0] <= 16**0.5 + 1e-3   # sqrt(d): two vectors of norm sqrt(d), over sqrt(d)


def test_a_finished_trial_is_read_and_another_setting_is_trained(trained, tmp_path):
    _, config, start = trained
    trial = Trial(replace(config, num_steps=2), start)
    first, = run_trials([trial], tmp_path, processes=0)
    file, = tmp_path.glob("*.csv")
    file.write_text(file.read_text().replace(str(first.mse[0]), "0.125"))
    kept, other = run_trials([trial, replace(trial, epsilon=1e-3)], tmp_path, processes=0)
    assert kept.mse[0] == 0.125 and other.mse[0] == pytest.approx(first.mse[0])
    moved = Path(start).with_name("elsewhere.safetensors")
    moved.write_bytes(Path(start).read_bytes())
    assert replace(trial, start=str(moved)).address() == trial.address()


def test_trials_side_by_side_give_the_numbers_of_trials_alone(trained, tmp_path):
    config = replace(trained[1], model="DiT-nano/4", num_steps=2, global_batch_size=4)   # other processes know it too
    trials = [Trial(replace(config, seed=seed)) for seed in (0, 1)]
    together, alone = (run_trials(trials, tmp_path / name, n) for name, n in (("two", 2), ("none", 0)))
    for one, other in zip(together, alone):
        pd.testing.assert_frame_equal(one, other)


def lines_of(mse):
    mse = np.asarray(mse, float)
    return pd.DataFrame({"step": range(1, len(mse) + 1), "mse": mse, "mse_error": 0.01, "grad_norm": 0.1,
                         "skipped": False})


def test_outcomes_are_told_apart():
    assert outcome(lines_of([1.0] * 6 + [0.3] * 6), 12) == "trains"
    assert outcome(lines_of([0.3] * 6 + [1.0] * 6), 12) == "zero predictor"
    assert outcome(lines_of([0.7] * 12), 12) == "between"
    assert outcome(lines_of([1.0] * 6 + [30.0] * 6), 12) == "explodes"
    assert outcome(lines_of([0.3] * 6), 12) == "explodes"   # it ended early


def test_the_alarm_comes_in_the_window_that_holds_the_break():
    assert alarms(lines_of([0.3] * 60), 5) == []
    assert alarms(lines_of([0.3] * 42 + [1.0] * 18), 5) == [45]     # two of its five steps were as usual
    assert alarms(lines_of([1.0] * 10), 5) == []
    assert alarms(lines_of([1.0] * 10), 5, history={"mse": [0.3] * 5, "grad_norm_max": [0.1] * 5}) == [5]


def test_the_interval_of_a_mean_is_scipys():
    from scipy.stats import ttest_1samp
    values = [0.2, 0.5, 0.4]
    expected = ttest_1samp(values, 0).confidence_interval()
    assert mean_interval(values) == pytest.approx((expected.low, expected.high))
    assert mean_interval([0.3]) == (0.3, 0.3)


def test_a_run_that_ended_early_has_lost_the_steps_it_did_not_take():
    losses = losses_after(lines_of([0.3, 0.3, 9.0, 0.4]), 2, 6)
    assert losses.tolist() == [2, 0.4, 2, 2]
    assert broke(losses) and not broke(np.full(6, 0.3))
    assert not broke(np.array([0.2] * 5 + [1.5] + [0.2] * 5))   # one step is no break
