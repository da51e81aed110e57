import os
from dataclasses import replace
from functools import partial
from importlib import import_module

import pytest
import torch
from tiny_training import fail_on_odd, threads_and_process  # a module that workers can import

from dit_repro.latents import LatentStore
from dit_repro.models.mistakes import MISTAKES
from dit_repro.training import RunFolder, Trainer, launch_each
from dit_repro.training.brief import build_with, train_briefly, train_each
from dit_repro.training.state import build_model
from dit_repro.workers import run_each


@pytest.fixture
def short(config):
    return replace(config, model="DiT-nano/4", num_steps=2, global_batch_size=4)   # other processes know it too


@pytest.mark.parametrize("processes", [0, 2])
def test_pieces_come_back_in_order_and_each_had_one_thread(processes, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = torch.get_num_threads()
    found = run_each(threads_and_process, range(5), "pieces", "piece", processes)
    assert [item for item, _, _ in found] == [0, 1, 2, 3, 4] and {threads for _, threads, _ in found} == {1}
    assert (os.getpid() in {process for _, _, process in found}) == (processes == 0)
    with pytest.raises(ValueError, match=r"odd: [13]"):
        run_each(fail_on_odd, range(4), "pieces", "piece", processes)
    assert torch.get_num_threads() == before


def test_a_negative_number_of_processes_is_refused(short, tmp_path):
    with pytest.raises(ValueError, match="processes=-1: expected at least 0"):
        run_each(threads_and_process, range(2), "pieces", "piece", -1)
    with pytest.raises(ValueError, match="num_processes=-1: expected at least 0"):
        launch_each({0: (short, tmp_path / "run")}, -1)
    assert not (tmp_path / "run").exists()


def test_runs_side_by_side_are_the_runs_one_by_one(short, tmp_path, monkeypatch):
    asked = {seed: replace(short, seed=seed) for seed in (0, 1)}
    runs = {seed: (config, tmp_path / f"together-{seed}") for seed, config in asked.items()}
    together = launch_each(runs)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    for seed, config in asked.items():
        Trainer(config, tmp_path / f"alone-{seed}").run()
    torch.set_num_threads(before)
    for seed in asked:
        assert together[seed].metrics().mse.tolist() == RunFolder(tmp_path / f"alone-{seed}").metrics().mse.tolist()
    assert together[0].metrics().mse.tolist() != together[1].metrics().mse.tolist()
    module = import_module("dit_repro.training.launch")   # its name in the package is the function's
    monkeypatch.setattr(module, "run_each", lambda *args: pytest.fail("workers for finished runs"))
    again = launch_each(runs)
    assert [run.path for run in again.values()] == [path for _, path in runs.values()]


def test_models_trained_side_by_side_are_those_that_one_process_trains(short):
    store = LatentStore.open(short.latents)
    mistake = next(mistake for mistake in MISTAKES if mistake.name == "norms: learned scale and shift")
    builds = [partial(build_model, short), partial(build_with, mistake, short)]
    for build, model in zip(builds, train_each([(build, short) for build in builds], processes=2)):
        alone = train_briefly(build(), short, store)
        assert model.state_dict().keys() == alone.state_dict().keys() and not model.training
        for name, tensor in alone.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], tensor)
