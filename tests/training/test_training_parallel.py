import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_training import tiny_config

from dit_repro.training import RunFolder, Trainer
from dit_repro.training.checkpoints import checkpoint_path, read_checkpoint
from dit_repro.training.parallel import connect

COLUMNS = ["loss", "mse", "vb", "mse_quarter_1", "grad_norm", "grad_norm_max", "update_norm", "ema_distance"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("two_ranks.py")
    done = subprocess.run([sys.executable, script, folder], capture_output=True, text=True, cwd=script.parents[2],
                          env=None, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    config = tiny_config(folder / "latents", num_steps=50, log_every=1, checkpoint_every=10, archive_every=10,
                         learning_rate=1e-3)
    Trainer(config, folder / "alone").run()
    Trainer(replace(config, clip_norm=0.05, num_steps=20), folder / "alone_clipped").run()
    return folder


def table(folder):
    return RunFolder(folder).metrics()[COLUMNS].to_numpy()


@pytest.mark.parametrize(("run", "peer"), [("ddp", "alone"), ("ddp_micro", "alone"), ("relay", "alone"),
                                           ("fsdp", "alone_clipped")])
def test_two_ranks_give_the_losses_of_one_process(runs, run, peer):
    assert len(table(runs / run)) == len(table(runs / peer)) >= 20
    np.testing.assert_allclose(table(runs / run), table(runs / peer), rtol=0, atol=1e-5)


@pytest.mark.parametrize("run", ["ddp", "fsdp", "relay"])
def test_a_checkpoint_says_nothing_about_the_ranks_that_wrote_it(runs, run):
    step = RunFolder(runs / run).checkpoints()[-1]
    theirs, alone = (read_checkpoint(checkpoint_path(runs / name / "checkpoints", "step", step))[0]
                     for name in (run, "alone_clipped" if run == "fsdp" else "alone"))
    assert theirs.keys() == alone.keys()
    for name, tensor in alone.items():
        torch.testing.assert_close(theirs[name].double(), tensor.double(), rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize("run", ["ddp", "relay"])
def test_classes_are_counted_over_all_ranks_and_across_hands(runs, run):
    theirs, alone = (RunFolder(runs / name).metrics()["mse_by_class"].dropna() for name in (run, "alone"))
    np.testing.assert_allclose(np.stack(theirs), np.stack(alone), rtol=1e-4)
    assert np.stack(alone).shape == (5, 4)


def test_a_batch_that_ranks_cannot_share_is_refused(runs):
    assert "cannot be shared by 2 processes" in RunFolder(runs / "odd").status()["reason"]


def test_ranks_wait_for_hours_while_one_of_them_works_alone(monkeypatch):
    asked = {}
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name, value in (("init_process_group", lambda backend, **more: asked.update(more)), ("get_rank", lambda: 0),
                        ("destroy_process_group", lambda: None)):
        monkeypatch.setattr(torch.distributed, name, value)
    with connect() as ranks:
        assert ranks.world_size == 2 and asked["timeout"].total_seconds() >= 12 * 3600


def test_more_processes_than_gpus_is_an_error_that_says_so(config, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(RuntimeError, match="LOCAL_RANK is 3 and this machine has 2 GPUs"):
        Trainer(config, tmp_path / "run").run()
