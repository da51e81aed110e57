import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))   # for tiny_training, which the scripts of this folder use too
from tiny_training import tiny_config, write_store


@pytest.fixture
def latents(tmp_path):
    return write_store(tmp_path / "latents")


@pytest.fixture
def config(latents):
    return tiny_config(latents)
