"""Training from a notebook: in a process of its own, which outlives the kernel and is found again."""
import os
import subprocess
import sys
import time
from collections.abc import Hashable
from pathlib import Path

from dit_repro.progress import progress
from dit_repro.training.config import TrainConfig
from dit_repro.training.loop import Trainer
from dit_repro.training.run_folder import FolderInUse, RunFolder
from dit_repro.workers import run_each


def launch(config: TrainConfig, path: str | Path, num_processes: int = 1) -> RunFolder:
    """Attach to the run in `path`, resume it or start it, follow it to its end, and return its folder.

    A finished run returns at once, and so does a longer one that kept a checkpoint of step `num_steps`: the folder
    returned ends there. Interrupting the call leaves the training running; calling again attaches to it.
    With `num_processes` 0 a run of seconds is trained in this process, which spares the start of another.
    ValueError where the folder holds a run with other settings; RuntimeError with the end of its log where it fails.
    """
    if num_processes < 0:
        raise ValueError(f"num_processes={num_processes}: expected at least 0, which trains in this process")
    folder, asked = RunFolder(path), RunFolder(path, config.num_steps)
    if not folder.is_past(config):
        folder.prepare(config)
    if _is_done(folder, config):
        return asked
    process = None
    try:
        if num_processes == 0:
            if Trainer(config, path).run() == "interrupted":
                raise KeyboardInterrupt(f"{path}: the step is saved, run this again to go on")
            return asked
    except FolderInUse:
        pass
    else:
        process = None if folder.is_locked() else _start(folder, num_processes)
    with progress(total=config.num_steps, initial=folder.status()["step"], desc=folder.path.name, unit="step") as bar:
        # Where two calls started a trainer each, one of them found the folder locked and left: follow the other.
        while ((process and process.poll() is None) or folder.is_locked()) and not folder.is_past(config):
            bar.update(folder.status()["step"] - bar.n)
            time.sleep(0.5)
        bar.update(folder.status()["step"] - bar.n)
    if not _is_done(folder, config):
        log = folder.path / "train.log"
        tail = "".join(log.read_text(errors="replace").splitlines(keepends=True)[-20:]) if log.is_file() else ""
        status = folder.status()
        raise RuntimeError(f"{folder.path}: {status['state']} at step {status['step']}; run this again to go on from "
                           f"its last checkpoint. The end of {log}:\n{tail}")
    return asked


def launch_each(runs: dict[Hashable, tuple[TrainConfig, Path]],
                processes: int | None = None) -> dict[Hashable, RunFolder]:
    """`launch` of each (config, path), under the same keys.

    `processes`, of a run: one run after another, as `launch` does it; None: runs of one process and one thread, as many
    at once as the CPU has cores, one after another where there is a GPU.
    """
    if processes is not None:
        return {key: launch(*run, processes) for key, run in progress(runs.items(), desc="runs", unit="run")}
    waiting = [(config, path) for config, path in runs.values() if not _is_done(RunFolder(path), config)]
    if waiting:   # a worker takes seconds to start
        run_each(_launch_here, waiting, "runs", "run")
    return {key: launch(*run, 0) for key, run in runs.items()}   # they are over: this only checks and opens


def _launch_here(run: tuple[TrainConfig, Path]) -> RunFolder:
    return launch(*run, num_processes=0)


def _is_done(folder: RunFolder, config: TrainConfig) -> bool:
    status = folder.status()
    return folder.is_past(config) or (status["state"] == "finished" and status["step"] == config.num_steps)


def _start(folder: RunFolder, num_processes: int) -> subprocess.Popen:
    command = [sys.executable, "-m"]
    if num_processes > 1:
        command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}", "-m"]
    command += ["dit_repro", "train", str(folder.path)]
    environment = {k: v for k, v in os.environ.items() if k != "DIT_REPRO_PROGRESS"}   # the bar here writes to it
    with open(folder.path / "train.log", "a", encoding="utf-8") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                                start_new_session=True)
