"""What a run says about itself: cheap sums kept on the device, read once a window, and the alarms drawn from them."""
import math
import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

IMAGES, MSE, MSE_SQUARED, VB, WEIGHT, TOTAL = range(6)   # columns of Monitor.tensors["samples"]
STEPS, NORM, NORM_MAX, SKIPPED = range(4)                # columns of Monitor.tensors["norms"]

SKIPS_ALLOWED = 20   # fp16 starts with 10 or 15 while it looks for its loss scale


@dataclass(frozen=True)
class Alarm:
    """Why a run is in trouble. `kind`: "non-finite", "loss", "gradient" or "skipping"."""
    kind: str
    step: int
    message: str


class Monitor:
    """Window statistics of losses and gradients. Nothing here waits for the device until a window is read.

    `tensors` and `history` go into the checkpoint, so a run killed inside a window resumes inside it. Loss sums are of
    this rank's samples and are added up over ranks when read; gradient norms are the same on every rank.
    """

    def __init__(self, names: list[str], num_classes: int, num_timesteps: int, device: torch.device):
        self.names, self.num_timesteps = names, num_timesteps
        self.tensors = {
            "samples": torch.zeros(6, dtype=torch.float64, device=device),
            "quarters": torch.zeros(4, 2, dtype=torch.float64, device=device),                  # count and MSE
            "classes": torch.zeros(num_classes + 1, 2, dtype=torch.float64, device=device),     # the last: null class
            "norms": torch.zeros(4, dtype=torch.float64, device=device),
            "bad_step": torch.zeros((), dtype=torch.int64, device=device),                      # first non-finite one
            "bad": torch.zeros(len(names), dtype=torch.bool, device=device),
        }
        self.history = {"mse": [], "grad_norm_max": [], "grad_norms": [], "skips": 0, "alarmed": None}

    def add_losses(self, losses, t: Tensor, y: Tensor) -> None:
        """Take in per-sample losses of a micro-batch; t are indices into the schedule, y what the model was told."""
        mse, vb, weight, total = (term.detach().double() for term in losses)
        one = torch.ones_like(mse)
        self.tensors["samples"] += torch.stack([one, mse, mse**2, vb, weight, total]).sum(1)
        counted = torch.stack([one, mse], 1)   # (N, 2)
        self.tensors["quarters"].index_add_(0, t * 4 // self.num_timesteps, counted)
        self.tensors["classes"].index_add_(0, y, counted)

    def add_gradients(self, norms: Tensor, total: Tensor, step: int, overflow_expected: bool) -> None:
        """Take in the norm of each parameter's gradient (P,) and of all, before clipping.

        With fp16 an overflow is part of finding the loss scale: the optimizer skips that step, which is counted.
        """
        finite = torch.isfinite(total)
        if overflow_expected:
            total, skipped = torch.where(finite, total, 0.0), (~finite).double()
        else:
            first = ~finite & (self.tensors["bad_step"] == 0)
            self.tensors["bad_step"] = torch.where(first, step, self.tensors["bad_step"])
            self.tensors["bad"] = torch.where(first, ~torch.isfinite(norms), self.tensors["bad"])
            skipped = torch.zeros_like(total)
        window = self.tensors["norms"]
        window += torch.stack([torch.ones_like(total), total, torch.zeros_like(total), skipped]).double()
        window[NORM_MAX] = torch.maximum(window[NORM_MAX], total)   # NaN stays NaN

    def outlier(self, norm: Tensor, ratio: float | None) -> bool:
        """Whether this step should be left out, for the policy "skip": a wait for the device at every step."""
        value, recent = float(norm), self.history["grad_norms"]
        if not math.isfinite(value) or (ratio and len(recent) == 100 and value > ratio * statistics.median(recent)):
            self.tensors["norms"][STEPS] += 1
            self.tensors["norms"][SKIPPED] += 1
            return True
        self.history["grad_norms"] = [*recent[-99:], value]
        return False

    def non_finite(self) -> str | None:
        """Which gradients were first not finite and when, or None; waits for the device."""
        step = int(self.tensors["bad_step"])
        if not step:
            return None
        bad = [name for name, flag in zip(self.names, self.tensors["bad"].tolist()) if flag]
        some = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
        where = "every parameter: the loss itself" if len(bad) == len(self.names) else some or "none alone, their sum"
        return f"step {step}: gradient not finite in {where}"

    def read_window(self, ranks) -> dict:
        """The window's statistics, summed over ranks, and a fresh window. NaN where nothing was counted."""
        samples = ranks.sum(self.tensors["samples"].clone()).tolist()
        quarters = ranks.sum(self.tensors["quarters"].clone()).tolist()
        norms = self.tensors["norms"].tolist()
        for name in ("samples", "quarters", "norms"):
            self.tensors[name].zero_()
        images, used = samples[IMAGES], norms[STEPS] - norms[SKIPPED]
        mean = [_ratio(value, images) for value in samples]
        return {
            "loss": mean[TOTAL], "mse": mean[MSE], "vb": mean[VB], "weight": mean[WEIGHT],
            "mse_error": math.sqrt(max(0.0, _ratio(mean[MSE_SQUARED] - mean[MSE] ** 2, images))),   # standard error
            **{f"mse_quarter_{i + 1}": _ratio(mse, count) for i, (count, mse) in enumerate(quarters)},
            "grad_norm": _ratio(norms[NORM], used), "grad_norm_max": norms[NORM_MAX],
            "skipped_steps": int(norms[SKIPPED]), "steps": int(norms[STEPS]),
        }

    def read_classes(self, ranks) -> list:
        """Mean MSE of each class since it was last read, the null class last; None if not seen, or not finite."""
        rows = ranks.sum(self.tensors["classes"].clone()).tolist()
        self.tensors["classes"].zero_()
        return [float(f"{mse / count:.5g}") if count and math.isfinite(mse) else None for count, mse in rows]

    def judge(self, row: dict, loss_ratio: float | None, grad_ratio: float | None) -> Alarm | None:
        """An alarm where this window breaks with the ones before it; one alarm until things are normal again.

        Only what is not finite is news during another alarm.

        A spike must exceed the median of up to 20 earlier windows by a ratio and by six standard errors, so that a
        window of few images does not raise one.
        """
        alarm, history = None, self.history
        history["skips"] = max(0, history["skips"] + 2 * row["skipped_steps"] - row["steps"])
        usual = {name: statistics.median(history[name]) for name in ("mse", "grad_norm_max") if len(history[name]) >= 5}
        if found := self.non_finite():
            alarm = Alarm("non-finite", row["step"], found)
            self.tensors["bad_step"].zero_()
        elif not row["skipped_steps"] and not math.isfinite(row["loss"]):
            alarm = Alarm("non-finite", row["step"], f"the loss of the window is {row['loss']}, with finite gradients")
        elif history["skips"] > SKIPS_ALLOWED:
            alarm = Alarm("skipping", row["step"], f"{history['skips']} more steps were skipped than taken: the "
                          "run goes on without learning")
        elif usual and loss_ratio and row["mse"] > max(loss_ratio * usual["mse"], usual["mse"] + 6 * row["mse_error"]):
            alarm = Alarm("loss", row["step"], f"MSE {row['mse']:.4g} in this window, {usual['mse']:.4g} before")
        elif usual and grad_ratio and row["grad_norm_max"] > grad_ratio * usual["grad_norm_max"]:
            alarm = Alarm("gradient", row["step"], f"gradient norm {row['grad_norm_max']:.4g}, "
                          f"{usual['grad_norm_max']:.4g} before")
        else:
            for name in ("mse", "grad_norm_max"):
                if math.isfinite(row[name]):
                    history[name] = [*history[name][-19:], row[name]]
        before, history["alarmed"] = history["alarmed"], alarm and alarm.kind
        return alarm if alarm and (not before or alarm.kind == "non-finite" != before) else None


def _ratio(value: float, count: float) -> float:
    return value / count if count else math.nan
