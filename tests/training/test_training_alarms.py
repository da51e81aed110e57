import math
import os
import signal
from dataclasses import replace

import pytest
import torch

from dit_repro.training import Diverged, RunFolder, Trainer
from dit_repro.training.monitor import Monitor
from dit_repro.training.parallel import Ranks

ALONE = Ranks(0, 1, torch.device("cpu"))
NAME = "blocks.1.mlp.fc1.weight"


class Faulty(Trainer):
    """One parameter's gradient is NaN at some steps."""
    bad_steps, bad_retries = (7,), (0,)

    def _step(self, batch):
        faulty = self.state.step + 1 in self.bad_steps and self.state.retry in self.bad_retries
        parameter = self.state.model.get_parameter(NAME)
        handle = parameter.register_hook(lambda gradient: gradient * (math.nan if faulty else 1))
        super()._step(batch)
        handle.remove()


def all_finite(model):
    return all(torch.isfinite(p).all() for p in model.parameters())


def test_stop_names_the_parameter_and_the_step_and_keeps_the_last_good_checkpoint(config, tmp_path):
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(Diverged, match=f"step 7: gradient not finite in {NAME}.*checkpoint before it: 4"):
        Faulty(config, folder.path).run()
    assert folder.checkpoints() == [4] and all_finite(folder.load_model())
    assert folder.checkpoints("alarm") == [8]   # the state in which it was noticed, for a post-mortem
    assert folder.status()["state"] == "diverged" and NAME in folder.status()["reason"]
    alarm, = (event for event in folder.events() if event["event"] == "alarm")
    assert (alarm["kind"], alarm["policy"], alarm["pinned"]) == ("non-finite", "stop", 4)
    assert Trainer(config, folder.path).run() == "finished"   # without the fault it goes on from there


def test_skip_leaves_the_bad_step_out_and_goes_on(config, tmp_path):
    folder = RunFolder(tmp_path / "run")
    config = replace(config, on_alarm="skip", log_every=1, checkpoint_every=1, archive_every=1)
    Faulty(config, folder.path).run()
    event, = (event for event in folder.events() if event["event"] == "skipped_step")
    assert event["step"] == 7 and event["grad_norm"] == "nan"
    weights = [folder.load_model(step, ema=False).get_parameter(NAME) for step in (6, 7, 8)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])
    assert all_finite(folder.load_model()) and folder.metrics()["skipped_steps"].tolist() == [0] * 6 + [1] + [0] * 5


def test_skip_stops_a_run_in_which_most_steps_are_skipped(config, tmp_path):
    trainer = Faulty(replace(config, on_alarm="skip", num_steps=40), tmp_path / "run")
    trainer.bad_steps = range(3, 41)
    with pytest.raises(Diverged, match=r"stopped at step 24: .*22 more steps were skipped than taken"):
        trainer.run()


def test_rollback_returns_to_the_archive_with_new_noise_and_loses_no_line(config, tmp_path):
    folder = RunFolder(tmp_path / "run")
    changes = {"on_alarm": "rollback", "archive_every": 4, "checkpoint_every": 2, "num_steps": 16}
    trainer = Faulty(replace(config, **changes), folder.path)
    trainer.bad_steps = (11,)
    assert trainer.run() == "finished"
    rollback, = (event for event in folder.events() if event["event"] == "rollback")
    assert (rollback["step"], rollback["to"], rollback["retry"]) == (12, 8, 1)
    pinned, = (event["pinned"] for event in folder.events() if event["event"] == "alarm")
    assert len(list(folder.checkpoint_folder.glob(f"*{pinned}.abandoned"))) == 1   # it led to the alarm
    assert folder.metrics()["step"].tolist() == list(range(2, 17, 2))
    assert all_finite(folder.load_model()) and folder.status()["state"] == "finished"


def test_rollback_gives_up_after_three_and_resumes_with_its_count(config, tmp_path):
    folder = RunFolder(tmp_path / "run")
    trainer = Faulty(replace(config, on_alarm="rollback", archive_every=4), folder.path)
    trainer.bad_steps, trainer.bad_retries = (7,), range(9)
    for _ in range(2):   # the count is in the checkpoint: a second start does not begin to count again
        with pytest.raises(Diverged, match="after 3 roll-backs"):
            trainer.run()
    assert [event["retry"] for event in folder.events() if event["event"] == "rollback"] == [1, 2, 3]


def test_rollback_without_an_archive_stops(config, tmp_path):
    with pytest.raises(Diverged, match="no archive to return to"):
        Faulty(replace(config, on_alarm="rollback"), tmp_path / "run").run()   # the first archive would be of step 8


def test_record_goes_on_and_pins_the_checkpoint_before_the_alarm(config, tmp_path):
    folder = RunFolder(tmp_path / "run")
    config = replace(config, on_alarm="record", keep_last=1, archive_every=0, num_steps=24)
    assert Faulty(config, folder.path).run() == "finished"
    assert folder.checkpoints() == [4, 24]   # one overwritten "latest" would have left only the broken one
    assert all_finite(folder.load_model(4)) and not all_finite(folder.load_model(24))
    assert math.isnan(folder.metrics()["mse"].iloc[-1])


def test_a_run_that_goes_bad_during_another_alarm_keeps_its_last_finite_state(config, tmp_path):
    class LossAlarmFirst(Faulty):
        bad_steps = (11,)

        def _log(self):   # an alarm of another kind at step 6, which is still on when gradients go bad
            alarm = super()._log()
            if alarm is None and self.state.step in (6, 8, 10):
                self.state.monitor.history["alarmed"] = "loss"
            return alarm

    folder = RunFolder(tmp_path / "run")
    changes = {"on_alarm": "record", "keep_last": 1, "archive_every": 0, "num_steps": 24}
    assert LossAlarmFirst(replace(config, **changes), folder.path).run() == "finished"
    assert folder.checkpoints() == [8, 24] and all_finite(folder.load_model(8))


def test_a_signal_in_a_window_that_went_bad_saves_nothing_under_record(config, tmp_path):
    class Signaled(Faulty):
        bad_steps = (5,)

        def _step(self, batch):
            super()._step(batch)
            if self.state.step + 1 == 5:
                os.kill(os.getpid(), signal.SIGTERM)

    folder = RunFolder(tmp_path / "run")
    trainer = Signaled(replace(config, on_alarm="record", keep_last=1, archive_every=0), folder.path)
    assert trainer.run() == "interrupted"
    assert folder.checkpoints() == [4] and all_finite(folder.load_model())


def test_rollback_removes_what_the_abandoned_branch_exported(config, tmp_path):
    folder = RunFolder(tmp_path / "run")
    trainer = Faulty(replace(config, on_alarm="rollback", archive_every=4, checkpoint_every=2, export_ema_every=2,
                             num_steps=16), folder.path)
    trainer.bad_steps, seen = (11,), []
    trainer.folder.save = lambda *args: (seen.append(folder.checkpoints("ema")), folder.save(*args))
    assert trainer.run() == "finished" and folder.checkpoints("ema") == list(range(2, 17, 2))
    assert seen.count([2, 4, 6, 8]) == 2   # at step 8 and when the run came back to it


def window(step, mse, error=0.01, grad=0.1, **changes):
    return {"step": step, "loss": mse, "mse": mse, "mse_error": error, "grad_norm_max": grad, "skipped_steps": 0,
            "steps": 100, **changes}


def judge(rows, loss_ratio=2.0, grad_ratio=5.0):
    monitor = Monitor(["w"], 3, 1000, torch.device("cpu"))
    return [alarm and alarm.kind for alarm in (monitor.judge(row, loss_ratio, grad_ratio) for row in rows)]


def test_a_divergence_like_the_one_of_the_first_replication_raises_one_alarm():
    flat = [window(i, 0.27 + 0.005 * (-1) ** i) for i in range(20)]
    climb = [window(20 + i, mse) for i, mse in enumerate((0.35, 0.5, 0.8, 1.0, 1.0, 1.0))]
    after = [window(26 + i, 0.27) for i in range(2)]
    again = [window(28, 0.9)]
    assert judge(flat + climb + after + again) == [None] * 22 + ["loss"] + [None] * 5 + ["loss"]


def test_a_window_of_few_images_does_not_raise_an_alarm():
    rows = [window(i, 0.27, error=0.15) for i in range(10)] + [window(10, 0.8, error=0.15)]
    assert judge(rows) == [None] * 11


def test_gradient_spikes_alarm_only_where_asked():
    rows = [window(i, 0.27) for i in range(10)] + [window(10, 0.27, grad=0.6)]
    assert judge(rows) == [None] * 10 + ["gradient"]
    assert judge(rows, grad_ratio=None) == [None] * 11


def test_outliers_are_judged_against_the_last_hundred_norms():
    monitor = Monitor(["w"], 3, 1000, torch.device("cpu"))
    assert not any(monitor.outlier(torch.tensor(1.0 if i else 50.0), 5.0) for i in range(100))   # too early to tell
    assert monitor.outlier(torch.tensor(6.0), 5.0) and not monitor.outlier(torch.tensor(4.0), 5.0)
    assert monitor.outlier(torch.tensor(math.inf), None) and not monitor.outlier(torch.tensor(6.0), None)


def test_every_parameter_not_finite_means_the_loss_itself():
    monitor = Monitor(["a", "b"], 3, 1000, torch.device("cpu"))
    for step, norms in ((1, (1.0, 2.0)), (2, (math.nan, math.inf)), (3, (1.0, math.nan))):
        monitor.add_gradients(torch.tensor(norms), torch.tensor(norms).norm(), step, False)
    assert monitor.non_finite() == "step 2: gradient not finite in every parameter: the loss itself"
    assert math.isnan(monitor.read_window(ALONE)["grad_norm_max"])
