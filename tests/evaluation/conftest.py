import os
import subprocess
import sys

import pytest

SCRIPT = """
import multiprocessing, sys
import torch, torch.distributed as dist
torch.set_num_threads(1)
folder = sys.argv[1]
sys.path.insert(0, sys.argv[2])

BODY

def connected(index, world):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=index, world_size=world)
    rank(index, world)
    dist.destroy_process_group()

for world in (1, 2, 4):
    ranks = [multiprocessing.get_context("fork").Process(target=connected, args=(i, world)) for i in range(world)]
    [r.start() for r in ranks]
    [r.join() for r in ranks]
    assert all(r.exitcode == 0 for r in ranks)
"""


@pytest.fixture
def in_ranks(tmp_path):
    """Runs `rank(index, world)` of a piece of source on 1, 2 and 4 gloo ranks; it finds tmp_path as `folder`."""
    def run(body):
        subprocess.run([sys.executable, "-c", SCRIPT.replace("BODY", body), str(tmp_path), os.path.dirname(__file__)],
                       check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return run
