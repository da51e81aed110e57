"""Trains the tiny model as two gloo ranks in several ways, for a test that compares what they leave in FOLDER.

PyTorch is imported once and the ranks are forked, since an import costs more than a run.
"""
import os
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from tiny_training import tiny_config, write_store

from dit_repro.training import Diverged, RunFolder, Trainer, loop, run_folder

torch.set_num_threads(1)


def slowly(write):
    def write_slowly(*arguments):
        time.sleep(0.3)
        write(*arguments)
    return write_slowly


class Signaled(Trainer):
    def _step(self, batch):
        super()._step(batch)
        if self.state.step + 1 == self.interrupt_at:
            os.kill(os.getpid(), signal.SIGTERM)


def two_ranks(config, folder, interrupt_at=None, slow=False):
    """Exit codes of the two ranks; `interrupt_at` sends SIGTERM to the second one alone at that step.

    3 and 4 are of a rank that left before what its run keeps was written: a scheduler may then end the writing one.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(2):
        if child := os.fork():
            children.append(child)
            continue
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
                       "MASTER_PORT": str(port)}
        code = 1
        try:
            trainer = Signaled(config, folder)
            trainer.interrupt_at = interrupt_at if rank == 1 else None
            if slow:
                loop.write_checkpoint = run_folder.write_checkpoint = slowly(loop.write_checkpoint)
            code = {"finished": 0, "interrupted": 85}[trainer.run()]
            if code == 85 and trainer.state.step not in trainer.folder.checkpoints():
                code = 3
        except Diverged:
            code = 2 if trainer.folder.checkpoints("alarm") else 4
        finally:
            os._exit(code)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main(folder):
    base = replace(tiny_config(write_store(folder / "latents")), num_steps=50, log_every=1, checkpoint_every=10,
                   archive_every=10, learning_rate=1e-3)
    assert two_ranks(base, folder / "ddp") == [0, 0]
    assert two_ranks(replace(base, micro_batch_size=2), folder / "ddp_micro") == [0, 0]
    assert two_ranks(replace(base, parallel="fsdp", clip_norm=0.05, num_steps=20), folder / "fsdp") == [0, 0]
    # A run that changes hands inside windows: two ranks, stopped by a signal that one of them sees; alone; sharded.
    assert two_ranks(base, folder / "relay", interrupt_at=15, slow=True) == [85, 85]
    assert RunFolder(folder / "relay").checkpoints()[-1] == 15
    Trainer(replace(base, num_steps=25), folder / "relay").run()
    assert two_ranks(replace(base, parallel="fsdp", micro_batch_size=2), folder / "relay") == [0, 0]
    assert two_ranks(replace(base, learning_rate=1e30, on_alarm="stop"), folder / "broken", slow=True) == [2, 2]
    # A rank without its share.
    assert two_ranks(replace(base, global_batch_size=7), folder / "odd") == [1, 1]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
