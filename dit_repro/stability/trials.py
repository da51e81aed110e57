"""Short trainings that differ in one thing only: the same start, the same draws, a line for each step."""
import hashlib
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from dit_repro.diffusion import training_losses
from dit_repro.files import atomic_write, sha256
from dit_repro.training import TrainConfig
from dit_repro.training.batches import draw_batch, latents_digest, open_latents
from dit_repro.training.checkpoints import read_checkpoint
from dit_repro.training.config import NUM_TIMESTEPS
from dit_repro.training.monitor import Monitor
from dit_repro.training.parallel import DEVICE, Ranks
from dit_repro.training.precision import autocast
from dit_repro.training.state import TrainState
from dit_repro.workers import run_each

CODE = [sys.modules[name].__file__ for name in (      # what makes a trial's numbers: corrected, it is trained again
    __name__, "dit_repro.models.dit", "dit_repro.diffusion.objectives", "dit_repro.diffusion.schedule",
    "dit_repro.training.batches")]
PROBE_EVERY = 10     # steps between two looks at logits and activations
PROBE_IMAGES = 8


@dataclass(frozen=True)
class Trial:
    """One short training: a config, and what TrainConfig does not offer because no real run should want it.

    It takes config.num_steps steps from `start`, with the draws that a Trainer's steps of those numbers have.
    """
    config: TrainConfig
    start: str | None = None            # checkpoint file to go on from, moments included; None: the initial weights
    epsilon: float = 1e-8               # of AdamW
    warmup_steps: int = 0               # the rate rises linearly over the first of these steps
    qk_norm: bool = False               # queries and keys normalized, without parameters
    skip_ratio: float | None = None     # leaves out steps whose gradient is beyond this times the median before
    fault_step: int | None = None       # in this step, counted from `start`, ...
    latent_scale: float = 1.0           # ... the latents are multiplied by this,
    gradient_scale: float = 1.0         # ... and the gradients, before anything looks at them, by this

    def address(self) -> str:
        """What the trial is found by: its settings, the bytes it starts from, the latents' checksums, and the code."""
        latents = latents_digest(open_latents(self.config, 1))
        named = asdict(replace(self, config=replace(self.config, latents=latents), start=None))
        found = {**named, "start": _hash(self.start) if self.start else None, "code": [*map(_hash, CODE)]}
        return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:24]


def _hash(path: str) -> str:
    return _once(sha256, path, Path(path).stat().st_mtime_ns)


@lru_cache(maxsize=8)   # many trials begin with the same file
def _once(read: Callable, path: str, changed: int):
    """`read(path)`, which is not read again before it is `changed`, a time."""
    return read(Path(path))


def run_trials(trials: Sequence[Trial], folder: str | Path, processes: int | None = None) -> list[pd.DataFrame]:
    """The lines of each trial, in order (`run_trial`); those that `folder` does not hold yet are trained now.

    Trials are independent, so on the CPU as many train at once as there are cores, one thread each.
    """
    folder = Path(folder)
    paths = [folder / f"{trial.address()}.csv" for trial in trials]
    missing = {path: trial for path, trial in zip(paths, trials) if not path.is_file()}
    run_each(_keep, missing.items(), "trials", "trial", processes)
    return [pd.read_csv(path) for path in paths]


def _keep(missing: tuple[Path, Trial]) -> None:
    path, trial = missing
    lines = run_trial(trial)
    with atomic_write(path) as file:
        lines.to_csv(file, index=False)


def run_trial(trial: Trial) -> pd.DataFrame:
    """One row a step: step, mse and its standard error, grad_norm before clipping, update_norm, skipped, and every
    PROBE_EVERY steps what `probe` finds. Ends early at a loss that is not finite."""
    config, store = trial.config, open_latents(trial.config, 1)
    state = TrainState(config, Ranks(0, 1, torch.device(DEVICE)))
    if trial.start:
        state.load(*_once(read_checkpoint, trial.start, Path(trial.start).stat().st_mtime_ns))   # copies all of it
    if trial.qk_norm:
        for block in state.model.blocks:
            block.attn.q_norm = block.attn.k_norm = nn.LayerNorm(block.attn.head_dim, elementwise_affine=False)
    schedule = config.noise_schedule()
    group, weights = state.optimizer.param_groups[0], [*state.trained.values()]
    group["eps"] = trial.epsilon
    values = [weight.detach() for weight in weights]
    before = [*map(torch.empty_like, values)]
    rows, norms = [], []

    def predict(*inputs):
        with autocast(config.precision, state.ranks.device):
            return state.model(*inputs)

    for number in range(1, config.num_steps + 1):
        group["lr"] = config.learning_rate * min(1, number / trial.warmup_steps if trial.warmup_steps else 1)
        batch = draw_batch(config, store, state.step + number, retry=state.retry).map(lambda tensor: tensor.to(DEVICE))
        faulty = number == trial.fault_step
        x0 = batch.x0 * trial.latent_scale if faulty else batch.x0
        losses = training_losses(predict, x0, batch.t, batch.y, schedule, config.objective, noise=batch.noise,
                                 input_noise=batch.input_noise)
        losses.total.mean().backward()
        gradients = [weight.grad for weight in weights]
        if faulty:
            torch._foreach_mul_(gradients, trial.gradient_scale)
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        row = {"step": state.step + number, "mse": float(losses.mse.detach().mean()),
               "mse_error": float(losses.mse.detach().std()) / len(x0) ** 0.5, "grad_norm": float(norm)}
        row["skipped"] = bool(trial.skip_ratio and len(norms) >= 5
                              and not row["grad_norm"] <= trial.skip_ratio * statistics.median(norms))
        if number % PROBE_EVERY == 1:
            x_t = schedule.add_noise(x0, batch.t, batch.input_noise)
            row |= probe(state.model, x_t[:PROBE_IMAGES], batch.t[:PROBE_IMAGES], batch.y[:PROBE_IMAGES])
        torch._foreach_copy_(before, values)
        if not row["skipped"]:
            if config.clip_norm:
                torch.nn.utils.clip_grads_with_norm_(weights, config.clip_norm, norm)
            state.optimizer.step()
            norms = [*norms[-99:], row["grad_norm"]]
        state.optimizer.zero_grad()
        torch._foreach_sub_(before, values)
        rows.append({**row, "update_norm": float(torch.stack(torch._foreach_norm(before)).norm())})
        if not losses.total.isfinite().all():
            break
    return pd.DataFrame(rows)


def outcome(lines: pd.DataFrame, num_steps: int) -> str:
    """How a trial of `num_steps` ended: "trains", at most half the zero predictor's loss over its last sixth;
    "zero predictor", that loss to a tenth; "explodes", more or not finite; "between"."""
    end = lines.mse.tail(max(1, num_steps // 6)).mean()
    if len(lines) < num_steps or not end <= 1.1:
        return "explodes"
    return "trains" if end <= 0.5 else "zero predictor" if end >= 0.9 else "between"


def losses_after(lines: pd.DataFrame, fault_step: int, num_steps: int) -> np.ndarray:
    """Noise MSE of the steps after the fault, (num_steps - fault_step,); above 2, or missing, it counts as 2."""
    return lines.mse.reindex(range(num_steps)).fillna(2).clip(upper=2).to_numpy()[fault_step:]


def broke(losses: np.ndarray) -> bool:
    """Whether five steps in a row had, on average, more than half of the zero predictor's loss."""
    return bool(pd.Series(losses).rolling(5, min_periods=min(5, len(losses))).mean().max() > 0.5)


def mean_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Student's interval for the mean of a few values, which are taken for normal; a point where there is one."""
    from scipy.stats import t
    values = np.asarray(values, float)
    half = t.ppf((1 + level) / 2, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return float(values.mean() - half), float(values.mean() + half)


def alarms(lines: pd.DataFrame, log_every: int, loss_ratio: float = 2.0, history: dict | None = None) -> list[int]:
    """Steps at which a Trainer that logs every `log_every` steps would have raised an alarm over these `lines`.

    history: what its monitor remembers of the time before, from a checkpoint's scalars["monitor"].
    """
    monitor = Monitor([], 1, NUM_TIMESTEPS, torch.device("cpu"))
    monitor.history |= history or {}
    found = []
    for first in range(0, len(lines), log_every):
        window = lines[first:first + log_every]
        mse = float(window.mse.mean())
        row = {"step": int(window.step.iloc[-1]), "loss": mse, "mse": mse, "steps": len(window),
               "skipped_steps": int(window.skipped.sum()),
               "mse_error": float((window.mse_error**2).sum() ** 0.5) / len(window),
               "grad_norm_max": float(window.grad_norm.max())}
        if monitor.judge(row, loss_ratio, None):
            found.append(row["step"])
    return found


@torch.no_grad()
def probe(model: nn.Module, x_t: Tensor, t: Tensor, y: Tensor) -> dict[str, float]:
    """largest_logit: absolute, before the softmax, of any attention; activation_rms: the largest of any block."""
    found = {"largest_logit": 0.0, "activation_rms": 0.0}

    def attention(module, inputs):
        qkv = module.qkv(inputs[0]).unflatten(-1, (3, module.num_heads, module.head_dim))   # (N, T, 3, heads, d)
        q, k, _ = qkv.permute(2, 0, 3, 1, 4)   # (N, heads, T, d)
        logits = module.q_norm(q) * module.scale @ module.k_norm(k).transpose(-2, -1)   # (N, heads, T, T)
        found["largest_logit"] = max(found["largest_logit"], float(logits.abs().max()))

    def block(module, inputs, output):
        found["activation_rms"] = max(found["activation_rms"], float(output.square().mean().sqrt()))

    handles = [part.attn.register_forward_pre_hook(attention) for part in model.blocks]
    handles += [part.register_forward_hook(block) for part in model.blocks]
    try:
        model(x_t, t, y)
    finally:
        for handle in handles:
            handle.remove()
    return found
