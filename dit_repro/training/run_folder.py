"""The folder of a run: what a reader finds in it, and what the one process that writes it may do."""
import fcntl
import json
import math
import os
import socket
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from dit_repro.files import write_json
from dit_repro.latents import LatentStore
from dit_repro.training.batches import latents_digest
from dit_repro.training.checkpoints import (
    DamagedCheckpoint,
    checkpoint_digest,
    checkpoint_path,
    list_checkpoints,
    read_checkpoint,
    read_scalars,
    remove_stale,
    write_checkpoint,
)
from dit_repro.training.config import TrainConfig
from dit_repro.training.json_lines import append_line, read_lines, to_line, write_if_changed


class FolderInUse(RuntimeError):
    """Another process trains in this folder."""


class RunFolder:
    """A run on disk. Reading needs no lock and never sees half a file; writing happens inside `writing(config)`.

    config.json, metrics.jsonl (a line a window), events.jsonl (what happened when), status.json, train.log,
    checkpoints/ (step-*, ema-*, alarm-*), previews/.
    With `last_step` it reads as a run of that many steps, also where the one on disk went on: config, metrics, events
    and checkpoints end there. Step s of a longer run is step s of a shorter one.
    """

    def __init__(self, path: str | Path, last_step: int | None = None):
        self.path = Path(path)
        self.last_step = last_step
        self.checkpoint_folder = self.path / "checkpoints"
        self.previews = self.path / "previews"

    # Reading

    def config(self) -> TrainConfig:
        """Raises FileNotFoundError where there is no run."""
        file = self.path / "config.json"
        if not file.is_file():
            raise FileNotFoundError(f"no run in {self.path}: there is no config.json. Start one with --config")
        try:
            config = TrainConfig.from_json(file.read_text())
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
        return replace(config, num_steps=self.last_step) if self.last_step else config

    def metrics(self):
        """A pandas DataFrame, one row a window of `log_every` steps; the columns of `Monitor.read_window`."""
        import pandas
        return pandas.DataFrame(self._until_last_step(read_lines(self.path / "metrics.jsonl")))

    def events(self) -> list[dict]:
        """What happened, oldest first: each has `time`, `event` and `step`."""
        return self._until_last_step(read_lines(self.path / "events.jsonl"))

    def _until_last_step(self, rows: list[dict]) -> list[dict]:
        return [row for row in rows if self.last_step is None or row["step"] <= self.last_step]

    def status(self) -> dict:
        """state, step, num_steps, steps_per_second and perhaps reason.

        The state is running, finished, interrupted (run it again), failed or diverged; "new" before the first step,
        "damaged" where status.json cannot be read, which a resumed run writes again.
        """
        try:
            status = json.loads((self.path / "status.json").read_text())
        except FileNotFoundError:
            status = {"state": "new", "step": 0}
        except ValueError:
            status = {"state": "damaged", "step": 0}
        if status["state"] == "running" and not self.is_locked():
            status["state"] = "interrupted"   # its process was killed
        return status

    def is_locked(self) -> bool:
        """Whether a process is training in this folder now."""
        if not (self.path / "run.lock").is_file():
            return False
        with open(self.path / "run.lock") as file:
            return not _lock(file, fcntl.LOCK_SH)

    def checkpoints(self, kind: str = "step") -> list[int]:
        """Steps that can be loaded, ascending; "ema" are exported EMA weights, "alarm" states that raised an alarm."""
        steps = list_checkpoints(self.checkpoint_folder, kind)
        return [step for step in steps if self.last_step is None or step <= self.last_step]

    def load_model(self, step: int | None = None, ema: bool = True):
        """The model in eval mode on the CPU, with EMA or raw weights of a checkpoint; the newest one without `step`."""
        from dit_repro.training.state import build_model
        exported = self.checkpoints("ema") if ema else []
        step = self._choose(step, {*self.checkpoints(), *exported})
        if step in exported:
            weights, _ = read_checkpoint(checkpoint_path(self.checkpoint_folder, "ema", step))
        else:
            weights = self._section(step, "ema" if ema else "model")
        model = build_model(self.config())
        model.load_state_dict(weights)
        return model.eval()

    def export_ema(self, step: int | None = None, path: str | Path | None = None) -> Path:
        """Write the EMA weights of a checkpoint alone, under the released checkpoint's names; returns the file."""
        config, step = self.config(), self._choose(step, self.checkpoints())
        path = Path(path) if path else checkpoint_path(self.checkpoint_folder, "ema", step)
        write_ema(path, self._section(step, "ema"), step, config)
        return path

    def _choose(self, step: int | None, steps) -> int:
        """`step`, or the newest of `steps` without it; FileNotFoundError where it is not one of them."""
        if not steps or step not in (None, *steps):
            raise FileNotFoundError(f"{self.path} has no checkpoint{'' if step is None else f' of step {step}'}; "
                                    f"it has {', '.join(map(str, sorted(steps))) or 'none yet'}")
        return max(steps) if step is None else step

    def _section(self, step: int, section: str) -> dict:
        tensors, _ = read_checkpoint(checkpoint_path(self.checkpoint_folder, "step", step), (section,))
        return {name.removeprefix(f"{section}."): tensor for name, tensor in tensors.items()}

    def verify(self) -> list[tuple[Path, str | None]]:
        """Every checkpoint file, read to its last byte, with what is wrong with it, or None."""
        results = []
        for path in sorted(self.checkpoint_folder.glob("*.safetensors")):
            try:
                read_checkpoint(path)
                results.append((path, None))
            except DamagedCheckpoint as error:
                results.append((path, str(error)))
        return results

    def fork(self, path: str | Path, step: int, **changes) -> "RunFolder":
        """A run in `path` that goes on from a checkpoint of this one with some settings changed, same draws.

        Start it with `launch(folder.config(), folder.path)`; another model or latent store than this run's is refused.
        Asked again, the folder is returned as far as it got; ValueError where it holds anything else.
        """
        config, other = replace(self.config(), **changes), RunFolder(path)
        source = checkpoint_path(self.checkpoint_folder, "step", self._choose(step, self.checkpoints()))
        if config.num_steps <= step:
            raise ValueError(f"num_steps = {config.num_steps}: a fork from step {step} has to end after it")
        checkpoint = checkpoint_digest(source)
        if begun := other.checkpoints():
            forks = [(event["step"], event.get("checkpoint")) for event in other.events() if event["event"] == "forked"]
            if (step, checkpoint) not in forks:
                raise ValueError(f"{other.path} holds a run at step {begun[-1]} that was not forked from {source}: use "
                                 "another folder")
            if not other.is_past(config):
                other.prepare(config)
            return RunFolder(path, config.num_steps)
        tensors, scalars = read_checkpoint(source)
        with other.writing(config):   # the event first: a fork killed in between is made again
            other.add_event("forked", step, source=str(source.resolve()), checkpoint=checkpoint,
                            changed=sorted(changes))
            other.save(tensors, {**scalars, "identity": {**scalars["identity"], "config": config.digest()}}, config)
        return other

    # Writing

    @contextmanager
    def writing(self, config: TrainConfig):
        """Own the folder: RuntimeError where another process does, ValueError where it holds another run."""
        self.prepare(config)
        with open(self.path / "run.lock", "a+") as file:
            if not _lock(file, fcntl.LOCK_EX):
                file.seek(0)
                raise FolderInUse(f"{self.path} is in use by {file.read().strip()}: two runs cannot share a folder")
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            for left_over in (*self.checkpoint_folder.glob("*.tmp"), *self.path.glob(".*.tmp")):
                left_over.unlink()   # of a process that was killed while it wrote
            events = self.path / "events.jsonl"
            write_if_changed(events, "".join(map(to_line, read_lines(events))))
            yield

    def prepare(self, config: TrainConfig) -> None:
        """Make the folder hold this run; ValueError names what differs in one begun there, which stays as it is."""
        if self.checkpoints() or self.is_locked():
            self._refuse_another(config)
        else:   # a model that cannot be built must not leave a folder behind
            import torch

            from dit_repro.training.state import build_model
            with torch.device("meta"):
                build_model(config)
        for folder in (self.checkpoint_folder, self.previews):
            folder.mkdir(parents=True, exist_ok=True)
        if not self.is_locked():
            write_if_changed(self.path / "config.json", config.to_json())

    def is_past(self, config: TrainConfig) -> bool:
        """Whether the run here went on after all that `config` asks for, so that its folder must stay as it is.

        ValueError where it holds another run, or is past num_steps and has no checkpoint of that step.
        """
        steps = self.checkpoints()
        if not steps or steps[-1] <= config.num_steps:
            return False
        self._refuse_another(config)
        if config.num_steps not in steps:
            raise ValueError(f"{self.path} is already at step {steps[-1]}, past num_steps = {config.num_steps}, and "
                             f"has no checkpoint of that step. Ask for one of {', '.join(map(str, steps))}, or use "
                             "another folder")
        return True

    def _refuse_another(self, config: TrainConfig) -> None:
        begun = self.config()
        if differences := begun.differences(config):
            listed = "; ".join(f"{name} is {old!r}, asked for {new!r}" for name, (old, new) in differences.items())
            raise ValueError(f"{self.path} holds another run: {listed}. Use another folder, or the same settings")
        if config.latents == begun.latents and not Path(config.latents).is_dir():
            return   # deleted: to go on is an error soon, to read what is finished is none
        for step in reversed(self.checkpoints()):
            try:
                held = read_scalars(checkpoint_path(self.checkpoint_folder, "step", step))["identity"]["latents"]
            except DamagedCheckpoint:
                continue   # or deleted since: whoever trains here sets it aside, and says so
            if held != (found := latents_digest(LatentStore.open(config.latents))):
                raise ValueError(f"{self.path} was trained with other latents than {config.latents} holds (checksum "
                                 f"{held}, here {found}): restore them, or train in another folder")
            return

    def add_metrics(self, row: dict) -> None:
        """Append a line; a value that is not finite becomes null, which metrics() reads as NaN."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        append_line(self.path / "metrics.jsonl", finite)

    def add_event(self, event: str, step: int, **details) -> None:
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        append_line(self.path / "events.jsonl", {"time": now, "event": event, "step": step, **details})

    def set_status(self, state: str, step: int, num_steps: int, **details) -> None:
        write_json(self.path / "status.json", {"state": state, "step": step, "num_steps": num_steps, **details})

    def cut_metrics(self, step: int) -> None:
        """Drop lines after `step`, which the resumed run writes again, and a torn last one."""
        file = self.path / "metrics.jsonl"
        if file.is_file():
            write_if_changed(file, "".join(to_line(row) for row in read_lines(file) if row["step"] <= step))

    def save(self, tensors: dict, scalars: dict, config: TrainConfig) -> None:
        """Write the checkpoint of a step, then delete those that retention does not keep."""
        write_checkpoint(checkpoint_path(self.checkpoint_folder, "step", scalars["step"]), tensors, scalars)
        pinned = {event["pinned"] for event in self.events() if event.get("pinned") is not None}
        remove_stale(self.checkpoint_folder, config.keep_last, config.archive_every, pinned)

    def newest_readable(self, identity: dict) -> int | None:
        """Step of the newest checkpoint that passes its checksum; None in a new run.

        Damaged ones are set aside under another name, said on stderr and in events.jsonl. RuntimeError where there are
        only damaged ones, ValueError where `identity` (digests of config and latents) is not what the file says.
        """
        damaged = []
        for step in reversed(self.checkpoints()):
            path = checkpoint_path(self.checkpoint_folder, "step", step)
            try:
                _, scalars = read_checkpoint(path)
            except DamagedCheckpoint as error:
                print(f"WARNING: {error}. Going back to an earlier one.", file=sys.stderr, flush=True)
                damaged.append((path, step, str(error)))
                continue
            if other := [name for name, digest in identity.items() if scalars["identity"][name] != digest]:
                raise ValueError(f"{path} was trained with other {' and '.join(other)}: restore it, or train "
                                 "in another folder")
            for path, bad_step, reason in damaged:
                path.rename(path.with_suffix(".damaged"))
                self.add_event("damaged_checkpoint", bad_step, reason=reason, used_instead=step)
            return step
        if damaged:
            raise RuntimeError(f"every checkpoint of {self.path} is damaged ({damaged[0][2]}): move checkpoints/ away "
                               "to train from the start")
        return None


def write_ema(path: Path, weights: dict, step: int, config: TrainConfig) -> None:
    write_checkpoint(path, weights, {"step": step, "model": config.model, "ema_decay": config.ema_decay})


def _lock(file, kind: int) -> bool:
    """Take a lock, which ends with the process however it ends; False where the writer's stands in the way."""
    for attempt in range(10 if kind == fcntl.LOCK_EX else 1):   # a reader's look takes the lock for a moment
        try:
            time.sleep(0.05 if attempt else 0)
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
    return False
