"""What a run folder says about a run that broke: losses beside their baselines, onset and alarm, weights."""
from dataclasses import dataclass

import numpy as np

from dit_repro.diffusion import loss_of_unit_gaussian
from dit_repro.training import RunFolder, TrainConfig

WINDOWS_BEFORE = 20   # windows behind "usual", as the monitor counts
ERRORS = 6            # standard errors above usual that a window of a healthy run does not reach
LASTING = 3           # windows in a row that make an excess a break and not a spike


def baselines(config: TrainConfig):
    """Noise MSE of predictors that know nothing, for all timesteps and for each quarter: a pandas DataFrame.

    A network that answers zero scores one at every timestep, plus the square of a declared noise offset; one that knows
    only that latents have unit variance scores `alphas_cumprod`. The run's own noise MSE belongs beside them.
    """
    import pandas
    zero = 1 + config.objective.noise_offset ** 2
    unit = loss_of_unit_gaussian(config.noise_schedule())   # (T,)
    rows = {"mse": unit.mean(), **{f"mse_quarter_{i + 1}": part.mean() for i, part in enumerate(unit.chunk(4))}}
    return pandas.DataFrame({"zero predictor": zero, "knows only the variance": {k: float(v) for k, v in rows.items()}})


@dataclass(frozen=True)
class Break:
    """A divergence as the loss curve shows it afterwards; steps are those of windows of `log_every`."""
    onset: int               # last step of the last window that was as usual
    usual: float             # noise MSE before
    level: float             # median noise MSE from the onset on; infinite where it is not finite
    recovered: bool          # whether the last window is as usual again
    alarm: int | None        # step of the first alarm at or after the onset, None where there was none

    @property
    def steps_to_alarm(self) -> int | None:
        return None if self.alarm is None else self.alarm - self.onset


def find_break(run: RunFolder) -> Break | None:
    """Where a run's loss left its usual level for at least `LASTING` windows, or to its end; None where it never did.

    Usual is the median of up to 20 windows before, without those in excess; excess is six standard errors more.
    """
    metrics = run.metrics()
    if not len(metrics):
        return None
    usual, excess, levels = [], [], []
    for mse, error in zip(metrics["mse"], metrics["mse_error"]):
        level = float(np.median(usual[-WINDOWS_BEFORE:])) if len(usual) >= 5 else np.inf
        out = len(usual) >= 5 and not mse <= level + ERRORS * error   # NaN is out
        if not out:
            usual.append(mse)
        excess.append(out)
        levels.append(level)
    for first in (i for i, out in enumerate(excess) if out and not excess[i - 1]):
        stretch = next((j for j in range(first, len(excess)) if not excess[j]), len(excess)) - first
        if stretch >= LASTING or first + stretch == len(excess):
            onset = int(metrics["step"].iloc[first - 1])
            alarms = [event["step"] for event in run.events() if event["event"] == "alarm" and event["step"] > onset]
            after = metrics["mse"][first:first + stretch].fillna(np.inf)
            return Break(onset, levels[first], float(after.median()), not excess[-1], min(alarms, default=None))
    return None


def inspect_weights(run: RunFolder, step: int | None = None, ema: bool = False):
    """Each weight tensor of a checkpoint: a pandas DataFrame of norm, root mean square, largest value, non-finite ones.

    A divergence that leaves this table clean is one that weights alone cannot show, as the post found.
    """
    import pandas
    rows = []
    for name, tensor in run.load_model(step, ema=ema).state_dict().items():
        values = tensor.double()
        rows.append({"tensor": name, "values": tensor.numel(), "norm": float(values.norm()),
                     "rms": float(values.square().mean().sqrt()), "largest": float(values.abs().max()),
                     "non_finite": int((~values.isfinite()).sum())})
    return pandas.DataFrame(rows)


def label_norms(run: RunFolder, step: int | None = None, ema: bool = False):
    """Norm of each row of the label table, (num_classes + 1,) float64; the last is the null class."""
    weights = run.load_model(step, ema=ema).state_dict()
    return next(weights[name] for name in weights if name.startswith("y_embedder.")).double().norm(dim=1)


def summary(run: RunFolder) -> list[str]:
    """The lines of `dit-repro stability check`: status, last losses beside baselines, break and alarm, weights."""
    config, metrics, status = run.config(), run.metrics(), run.status()
    lines = [f"{run.path}: {status['state']} at step {status['step']}"]
    if not len(metrics):
        return [*lines, "no metrics yet"]
    beside = baselines(config).assign(run=metrics.iloc[-1])
    lines += ["noise MSE of the last window:", *beside.to_string(float_format="{:.4f}".format).splitlines()]
    if found := find_break(run):
        end = "it came back" if found.recovered else "it did not come back"
        told = "no alarm" if found.alarm is None else f"alarm {found.steps_to_alarm} steps later, at {found.alarm}"
        lines.append(f"loss left {found.usual:.4g} after step {found.onset} for {found.level:.4g}; {end}; {told}")
    else:
        lines.append("the loss never left its usual level for long")
    if run.checkpoints():
        step, weights = run.checkpoints()[-1], inspect_weights(run)
        largest, norms = weights.loc[weights["largest"].idxmax()], label_norms(run)
        lines += [f"raw weights of step {step}: {weights['non_finite'].sum()} not finite; largest value "
                  f"{largest['largest']:.3g} in {largest['tensor']}",
                  f"label table: norms {norms[:-1].min():.3g} to {norms[:-1].max():.3g}, null class {norms[-1]:.3g}"]
    return lines
