import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))   # for tiny_training
from tiny_training import tiny_config, write_store

from dit_repro.training import RunFolder, Trainer


@pytest.fixture(scope="session")
def train(tmp_path_factory):
    """A function that trains a tiny model with some settings and returns its run folder."""
    latents = write_store(tmp_path_factory.mktemp("latents") / "store")

    def trained(**changes):
        folder = tmp_path_factory.mktemp("run")
        Trainer(tiny_config(latents, **changes), folder).run()
        return RunFolder(folder)

    return trained


@pytest.fixture(scope="session")
def tiny_run(train):
    """12 steps of a tiny model, checkpoints at 8 and 12."""
    return train()
