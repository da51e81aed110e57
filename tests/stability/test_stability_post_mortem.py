import math

import pytest
from click.testing import CliRunner
from tiny_training import tiny_config

from dit_repro.cli import main
from dit_repro.diffusion import Objective
from dit_repro.stability import baselines, find_break, inspect_weights, label_norms
from dit_repro.training import RunFolder


def run_with_losses(tmp_path, losses, alarms=()):
    """A run folder with a window of ten steps for each loss, and alarms at steps."""
    run = RunFolder(tmp_path)
    run.prepare(tiny_config("latents"))
    for index, mse in enumerate(losses, 1):
        run.add_metrics({"step": 10 * index, "mse": mse, "mse_error": 0.005})
    for step in alarms:
        run.add_event("alarm", step)
    return run


def test_a_divergence_is_dated_and_its_alarm_timed(tmp_path):
    run = run_with_losses(tmp_path, [0.9, 0.5, *[0.27] * 20, 0.32, 0.6, *[1.0] * 5], alarms=[60, 240])
    found = find_break(run)
    assert (found.onset, found.usual, found.level, found.recovered) == (220, 0.27, 1.0, False)
    assert (found.alarm, found.steps_to_alarm) == (240, 20)   # the one at 60 was about something else


def test_noise_a_single_spike_and_a_falling_loss_are_no_divergence(tmp_path):
    falling = [0.9 * 0.95**i + 0.01 * math.sin(7 * i) for i in range(40)]
    assert find_break(run_with_losses(tmp_path / "falling", falling)) is None
    assert find_break(run_with_losses(tmp_path / "spike", [0.27] * 12 + [0.9] + [0.27] * 5)) is None
    assert find_break(run_with_losses(tmp_path / "empty", [])) is None


def test_a_break_that_recovers_and_a_loss_that_is_not_finite_are_told(tmp_path):
    found = find_break(run_with_losses(tmp_path / "back", [0.27] * 12 + [0.9] * 4 + [0.27] * 5))
    assert (found.onset, found.recovered, found.alarm, found.steps_to_alarm) == (120, True, None, None)
    assert find_break(run_with_losses(tmp_path / "nan", [0.27] * 12 + [math.nan] * 2)).level == math.inf


def test_baselines_follow_schedule_and_objective():
    table = baselines(tiny_config("latents", objective=Objective(noise_offset=0.1)))
    assert table["zero predictor"].unique() == pytest.approx([1.01])
    assert table.loc["mse", "knows only the variance"] == pytest.approx(0.2755, abs=1e-4)
    quarters = table["knows only the variance"].iloc[1:]
    assert quarters.is_monotonic_decreasing and quarters.mean() == pytest.approx(0.2755, abs=1e-4)


def test_weights_are_inspected_by_tensor_and_check_prints_all_of_it(tiny_run):
    weights = inspect_weights(tiny_run, 12).set_index("tensor")
    assert weights.loc["blocks.1.attn.qkv.weight", "values"] == 3 * 32 * 32 and not weights["non_finite"].any()
    assert weights["rms"].to_numpy() == pytest.approx((weights["norm"] / weights["values"] ** 0.5).to_numpy())
    assert len(label_norms(tiny_run)) == 4   # three classes and the null class
    printed = CliRunner().invoke(main, ["stability", "check", str(tiny_run.path), "--samples", "0"])
    assert printed.exit_code == 0 and "zero predictor" in printed.output and "0 not finite" in printed.output
