"""The training loop: draw, predict, step, average; look at the numbers; save; go on from where a run was left."""
import signal
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import torch

from dit_repro.allocator import keep_freed_memory
from dit_repro.diffusion import training_losses
from dit_repro.progress import progress
from dit_repro.training.batches import Batch, batches_from, latents_digest, open_latents
from dit_repro.training.checkpoints import checkpoint_path, read_checkpoint, require_space, size_of, write_checkpoint
from dit_repro.training.config import TrainConfig
from dit_repro.training.monitor import Alarm
from dit_repro.training.parallel import accumulating, connect, device_name, local
from dit_repro.training.precision import autocast, matmul_precision
from dit_repro.training.run_folder import RunFolder, write_ema
from dit_repro.training.state import TrainState

RESUME_ME = 85     # exit code of an interrupted run: the same command goes on with it
MAX_ROLLBACKS = 3  # a run that needs more has a cause that other noise does not cure


class Diverged(RuntimeError):
    """The monitor raised an alarm and the policy was to stop."""


class Trainer:
    """Trains, or goes on training, the run in a folder. `run()` may be killed at any moment and called again.

    preview(model, path): called every `preview_every` steps with the model in eval mode, once with raw and once with
    EMA weights; it writes a picture to `path` plus a suffix.
    """

    def __init__(self, config: TrainConfig, folder: str | Path, preview=None):
        self.config, self.folder, self.preview = config, RunFolder(folder), preview
        self.state = self.bar = self.tensorboard = None
        if config.preview_every and preview is None:
            raise ValueError(f"preview_every = {config.preview_every}: pass a preview function, or set it to 0")

    def run(self) -> str:
        """Train to the end: "finished", or "interrupted" after SIGTERM, SIGUSR1 or SIGINT, with the step saved.

        A folder whose run is longer and kept a checkpoint of the last step asked for is finished, and left as it is.
        Raises Diverged on an alarm whose policy is to stop, ValueError for data or settings that do not fit the run.
        """
        if self.folder.is_past(self.config):
            return "finished"
        keep_freed_memory()
        with connect() as self.ranks, matmul_precision(self.config.precision), stop_signals() as self.signals:
            if not self.ranks.is_main:
                return self._train()
            with self.folder.writing(self.config):
                try:
                    outcome = self._train()
                except BaseException as error:
                    self._leave("diverged" if isinstance(error, Diverged) else "failed", str(error) or repr(error))
                    raise
                self._leave(outcome)
                return outcome

    def _train(self) -> str:
        config = self.config
        store = open_latents(config, self.ranks.world_size)
        self.state = state = TrainState(config, self.ranks)
        self.schedule = config.noise_schedule()
        self._restore(store)
        batches = batches_from(config, store, state.step + 1, self.ranks, state.retry)
        while state.step < config.num_steps:
            self._step(next(batches))
            state.step += 1
            if self.bar:
                self.bar.update(state.step - self.bar.n)   # backwards after a roll-back
            last, stopping = state.step == config.num_steps, self.ranks.any(bool(self.signals))
            if last or state.step % config.log_every == 0:
                alarm = self._log()
                if alarm and self._answer(alarm) == "rolled back":
                    batches.close()
                    batches = batches_from(config, store, state.step + 1, self.ranks, state.retry)
                    continue
            if last or stopping or state.step % config.checkpoint_every == 0:
                self._save()
            if stopping and not last:
                self.ranks.wait()   # for the main one's save
                batches.close()
                return "interrupted"
        return "finished"

    def _step(self, batch: Batch) -> None:
        """One optimizer step on the mean loss of the global batch, however it is cut into ranks and micro-batches."""
        config, state = self.config, self.state
        parts = batch.split(config.micro_batch_size or len(batch))
        for part in parts:
            with accumulating(state.wrapped, more_to_come=part is not parts[-1]):
                losses = training_losses(self._predict, part.x0, part.t, part.y, self.schedule, config.objective,
                                         noise=part.noise, input_noise=part.input_noise)
                # Ranks average their gradients, so their number cancels.
                loss = losses.total.sum() * self.ranks.world_size / config.global_batch_size
                state.scaler.scale(loss).backward()
            state.monitor.add_losses(losses, part.t, part.y)
        state.scaler.unscale_(state.optimizer)   # before gradients are measured or clipped
        norms, norm = self._gradient_norms()
        step = state.step + 1
        self.update_norm = 0.0
        if config.on_alarm == "skip" and state.monitor.outlier(norm, config.alarm_grad_ratio):
            self._event("skipped_step", step=step, grad_norm=str(float(norm)))
            state.optimizer.zero_grad()
            return
        state.monitor.add_gradients(norms, norm, step, state.scaler.is_enabled())
        if config.clip_norm:
            torch.nn.utils.clip_grads_with_norm_(state.trained.values(), config.clip_norm, norm)
        logging = step % config.log_every == 0 or step == config.num_steps
        before = [local(p).detach().clone() for p in state.trained.values()] if logging else None
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.optimizer.zero_grad()
        state.ema.update(state.model, step)
        if logging:
            changes = torch._foreach_sub([local(p).detach() for p in state.trained.values()], before)
            self.update_norm = self._total(torch.stack(torch._foreach_norm(changes)).square()).sum().sqrt()

    def _predict(self, x, t, y):
        with autocast(self.config.precision, self.ranks.device):
            return self.state.wrapped(x, t, y)   # (N, C or 2C, H, W)

    def _gradient_norms(self):
        """Norm of each parameter's gradient (P,), and of them all."""
        gradients = [local(p.grad) for p in self.state.trained.values()]
        squares = self._total(torch.stack(torch._foreach_norm(gradients)).square())
        return squares.sqrt(), squares.sum().sqrt()

    def _total(self, squares):
        """Sums of squares over the shards of FSDP; otherwise every rank has the whole already."""
        return self.ranks.sum(squares) if self.config.parallel == "fsdp" else squares

    def _log(self) -> Alarm | None:
        config, state = self.config, self.state
        distance, size = self._total(state.ema.squared_distances(state.model)).sqrt().tolist()
        row = {"step": state.step, "images": state.step * config.global_batch_size,
               **state.monitor.read_window(self.ranks), "update_norm": float(self.update_norm),
               "ema_distance": distance / size}
        if state.scaler.is_enabled():
            row["loss_scale"] = state.scaler.get_scale()
        if state.step % config.checkpoint_every == 0:
            row["mse_by_class"] = state.monitor.read_classes(self.ranks)
        if self.ranks.is_main:
            self.folder.add_metrics(row)
            if self.tensorboard:
                for name, value in row.items():
                    if isinstance(value, (int, float)):
                        self.tensorboard.add_scalar(name, value, state.step)
            self.bar.set_postfix(mse=f"{row['mse']:.4f}", refresh=False)
            now, (then, step) = time.monotonic(), self.reported
            if now - then > 1:   # a reader wants it fresh, not at every step of a small model
                self._status("running", steps_per_second=max(0, state.step - step) / (now - then))
                self.reported = now, state.step
        return state.monitor.judge(row, config.alarm_loss_ratio, config.alarm_grad_ratio)

    def _answer(self, alarm: Alarm) -> str:
        """Act on an alarm: it is recorded, and the newest checkpoint before it stays for ever, whatever the policy.

        Gradients that are not finite alarm also during another alarm, so "record" never loses the last finite state.
        """
        config, state = self.config, self.state
        steps = self.ranks.from_main(self.folder.checkpoints())
        newest = max(steps, default=None)
        self._event("alarm", kind=alarm.kind, message=alarm.message, policy=config.on_alarm, pinned=newest)
        if config.on_alarm == "record" or (config.on_alarm == "skip" and alarm.kind in ("loss", "gradient")):
            return "recorded"
        tensors = state.tensors()
        if self.ranks.is_main:
            path = checkpoint_path(self.folder.checkpoint_folder, "alarm", state.step)
            write_checkpoint(path, tensors, self._scalars())
        self.ranks.wait()
        archives = [step for step in steps if config.archive_every and step % config.archive_every == 0]
        if config.on_alarm != "rollback" or not archives or state.retry == MAX_ROLLBACKS:
            tried = {"rollback": f" after {state.retry} roll-backs" if archives else " with no archive to return to"}
            raise Diverged(f"stopped at step {state.step}{tried.get(config.on_alarm, '')}: {alarm.kind} alarm, "
                           f"{alarm.message}. The newest checkpoint before it: {newest or 'none'}")
        retry = state.retry + 1
        self._event("rollback", to=archives[-1], retry=retry)
        self._load(archives[-1])
        state.retry = retry
        tensors = state.tensors()
        if self.ranks.is_main:   # in this order: killed in between, the run meets the same alarm again
            for step in steps:
                path = checkpoint_path(self.folder.checkpoint_folder, "step", step)
                if step > state.step and step == newest:   # the pinned one: kept, under a name that no resume takes
                    path.rename(path.with_suffix(".abandoned"))
                elif step > state.step:
                    path.unlink()
            for step in self.folder.checkpoints("ema"):
                if step > state.step:
                    checkpoint_path(self.folder.checkpoint_folder, "ema", step).unlink()
            self.folder.save(tensors, self._scalars(), config)
            self.folder.cut_metrics(state.step)
        return "rolled back"

    def _save(self) -> None:
        """What a step leaves: previews and exports first, since a run killed before its save makes them again."""
        config, state = self.config, self.state
        if bad := state.monitor.non_finite():   # only between windows: at their ends the monitor has judged
            if config.on_alarm == "record":
                return   # a resumed run meets it again and judges it at the window's end, where the good one is pinned
            raise Diverged(f"not saved at step {state.step}: {bad}")
        tensors = state.tensors()
        if not self.ranks.is_main:
            return
        if config.preview_every and state.step % config.preview_every == 0:
            self._draw_previews()
        if config.export_ema_every and state.step % config.export_ema_every == 0:
            weights = {name.removeprefix("ema."): tensor for name, tensor in tensors.items() if name.startswith("ema.")}
            write_ema(checkpoint_path(self.folder.checkpoint_folder, "ema", state.step), weights, state.step, config)
        self.folder.save(tensors, self._scalars(), config)
        self._event("saved")

    def _draw_previews(self) -> None:
        model, device = self.state.model.eval(), self.ranks.device
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            self.preview(model, self.folder.previews / f"{self.state.step:08d}-raw")
            with self.state.ema.applied_to(model):
                self.preview(model, self.folder.previews / f"{self.state.step:08d}-ema")
        model.train()

    def _restore(self, store) -> None:
        """Load the newest readable checkpoint, if any, and make the folder's files end where it does."""
        config, state = self.config, self.state
        self.identity = {"config": config.digest(), "latents": latents_digest(store)}
        step = self.ranks.from_main(self.folder.newest_readable(self.identity) if self.ranks.is_main else None)
        if step is not None:
            self._load(step)
        self.reported = time.monotonic(), state.step
        if self.ranks.is_main:
            self.folder.cut_metrics(state.step)
            require_space(self.folder.checkpoint_folder, 4 * size_of(state.model.state_dict()))
            self._event("resumed" if step else "started", world_size=self.ranks.world_size, torch=torch.__version__,
                        device=device_name(self.ranks.device), threads=torch.get_num_threads(), images=len(store))
            self._status("running", steps_per_second=None)
            self.bar = progress(total=config.num_steps, initial=state.step, desc=self.folder.path.name, unit="step")
            if config.tensorboard:
                self.tensorboard = open_tensorboard(self.folder.path / "tensorboard", state.step + 1)

    def _scalars(self) -> dict:
        return {**self.state.scalars(), "identity": self.identity}

    def _load(self, step: int) -> None:
        self.state.load(*read_checkpoint(checkpoint_path(self.folder.checkpoint_folder, "step", step)))

    def _event(self, event: str, step: int | None = None, **details) -> None:
        if self.ranks.is_main:
            self.folder.add_event(event, self.state.step if step is None and self.state else step or 0, **details)

    def _status(self, state: str, **details) -> None:
        step = self.state.step if self.state else self.folder.status()["step"]
        self.folder.set_status(state, step, self.config.num_steps, **details)

    def _leave(self, outcome: str, reason: str | None = None) -> None:
        """Write how the run ended; on a full disk that may fail, and the run's own error matters more."""
        details = {"reason": reason} if reason else {}
        for shown in (self.bar, self.tensorboard):
            if shown:
                shown.close()
        try:
            self._status(outcome, **details)
            self._event(outcome, **details)
        except OSError as error:
            print(f"WARNING: {self.folder.path}: could not record that the run {outcome} ({error})", file=sys.stderr)


@contextmanager
def stop_signals():
    """A list that fills up once the process is asked to stop. A second Ctrl-C ends it at once."""
    received = []
    if threading.current_thread() is not threading.main_thread():
        yield received   # only the main thread may handle signals
        return

    def note(number, frame):
        received.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def open_tensorboard(folder: Path, step: int):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("tensorboard = True: install it with pip install 'dit-repro[tensorboard]'") from error
    return SummaryWriter(folder, purge_step=step)
