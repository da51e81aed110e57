"""Kills a training process with SIGKILL many times and starts it again each time. Usage: kill_trainer.py FOLDER KILLS

Half of the kills come after a random time, half while a checkpoint is being written. Every run that reaches its end is
compared with one that was never interrupted. PyTorch is imported once and each trainer is forked.
"""
import os
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from tiny_training import final_bytes, tiny_config, write_store

from dit_repro.training import RunFolder, Trainer, launch

torch.set_num_threads(1)


def start(config, folder):
    if child := os.fork():
        return child
    sys.stderr = open(os.devnull, "w")   # noqa: SIM115 - the child ends in _exit
    code = 1
    try:
        code = {"finished": 0}[Trainer(config, folder).run()]
    finally:
        os._exit(code)


def killed(child, folder, in_save, rng):
    """Whether the child was killed before it ended by itself, and whether that was inside a save."""
    deadline = time.monotonic() + (60 if in_save else rng.uniform(0, 0.5))
    while time.monotonic() < deadline and not (in_save and any(folder.glob("checkpoints/*.tmp"))):
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
        time.sleep(0 if in_save else 0.002)
    os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), f"a trainer ended with {code}: {RunFolder(folder).status()}"
    return code != 0, any(folder.glob("checkpoints/*.tmp"))


def main(folder, kills):
    latents = write_store(folder / "latents")
    config = tiny_config(latents, num_steps=24, log_every=1, checkpoint_every=2, archive_every=8)
    rng, seed = random.Random(), 0
    counts = {"killed": 0, "killed inside a save": 0, "runs finished": 0, "lost or different": 0, "unreadable": 0}
    while counts["killed"] < kills:
        run, whole = folder / f"run{seed}", folder / f"whole{seed}"
        this = replace(config, seed=seed)
        while RunFolder(run).status()["state"] != "finished":
            child = start(this, run)
            was_killed, in_save = killed(child, run, counts["killed"] % 2 == 1, rng) if counts["killed"] < kills else \
                (os.waitpid(child, 0)[1] != 0, False)
            counts["killed"] += was_killed
            counts["killed inside a save"] += was_killed and in_save
            counts["unreadable"] += sum(problem is not None for _, problem in RunFolder(run).verify())
        assert os.waitstatus_to_exitcode(os.waitpid(start(this, whole), 0)[1]) == 0
        counts["runs finished"] += 1
        counts["lost or different"] += final_bytes(run) != final_bytes(whole)
        seed += 1
    # A notebook attaches to a run that another process is training: it starts nothing and returns at the end.
    this = replace(config, seed=seed)
    child = start(this, folder / "attached")
    while RunFolder(folder / "attached").status()["state"] != "running":
        time.sleep(0.01)
    launch(this, folder / "attached")
    assert not (folder / "attached/train.log").exists() and os.waitpid(child, 0)[1] == 0
    print(", ".join(f"{count} {name}" for name, count in counts.items()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
