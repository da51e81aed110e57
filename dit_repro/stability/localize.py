"""Which quantity of a captured step is the first that arithmetic alone cannot explain."""
import copy
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dit_repro.latents import Autoencoder
from dit_repro.stability.capture import Capture, draw, take_again
from dit_repro.stability.replay import WALK, quantities, relative_error
from dit_repro.stability.step import encode, to_pixels

# The same code on other hardware sums in another order: its rounding has the same size, but other signs. Behind a norm
# are many values and the size is well measured; behind one sample's loss there are few, and it may be off by a factor.
MARGIN = 8
UNIT_ROUNDOFF = {"fp32": 2**-24, "tf32": 2**-11, "bf16": 2**-8, "fp16": 2**-11}


@dataclass(frozen=True)
class Check:
    """One quantity: its relative distance from the wide reference, and how far rounding alone may take it."""
    stage: str
    quantity: str
    error: float
    bound: float
    hint: str = ""

    @property
    def broken(self) -> bool:
        return not (math.isfinite(self.error) and self.error <= self.bound)


@dataclass(frozen=True)
class Finding:
    """What the walk found. `first`: the first broken check, None where there is none; `checks`: all, in order."""
    first: Check | None
    checks: list[Check]

    @property
    def stage(self) -> str | None:
        return self.first and self.first.stage

    def table(self):
        """Every check as a pandas DataFrame."""
        import pandas
        return pandas.DataFrame([{"stage": check.stage, "quantity": check.quantity, "error": check.error,
                                  "bound": check.bound, "broken": check.broken, "hint": check.hint}
                                 for check in self.checks])

    def __str__(self) -> str:
        if self.first is None:
            return f"nothing is broken: {len(self.checks)} quantities agree within their rounding"
        return (f"{self.first.stage} ({self.first.quantity}) is broken first: off by {self.first.error:.2g}, rounding "
                f"explains {self.first.bound:.2g}. {self.first.hint}").strip()


def localize_first_broken(capture: Capture, autoencoder: Autoencoder | None = None,
                          images: Tensor | None = None) -> Finding:
    """Walk a captured step against a float64 recomputation and name the first quantity that disagrees.

    Each quantity is computed from the captured ones before it, so a fault shows where it happens and nowhere earlier.
    The bound is measured: the correct code runs once more in the capture's own precision, and a captured value may lie
    `MARGIN` times as far from float64 as that run does, or as the format's unit roundoff where that is more.
    With the autoencoder the walk starts at pixels: those in the capture, or `images` (N, 3, H, W) uint8.
    """
    checks = _check_pixels(capture, autoencoder, images) if autoencoder is not None else []
    checks += _check_start(capture)
    wide = take_again(capture, "fp64", anchored=True)
    rounded = take_again(capture, anchored=True)
    for stage, prefix in WALK:
        # Only the network is in the capture's format; losses and the optimizer are always in float32.
        roundoff = UNIT_ROUNDOFF[capture.config.precision if stage in ("activation", "gradients") else "fp32"]
        for quantity, names in quantities(wide, prefix).items():
            captured, reference, same = ([record.get(name) for name in names]
                                         for record in (capture.record, wide, rounded))
            error, bound = relative_error(captured, reference), MARGIN * max(relative_error(same, reference), roundoff)
            if stage == "latent scale" and not _is_scaled(captured, reference, error):
                error = 0.0   # the next check looks at the same latents
            label = f"{stage} {quantity.split('.')[1]}" if stage == "activation" else stage
            check = Check(label, quantity, error, bound)
            checks.append(replace(check, hint=_hint(check, capture, captured, reference)) if check.broken else check)
    return Finding(next((check for check in checks if check.broken), None), checks)


def _factor(captured: list[Tensor], reference: list[Tensor]) -> tuple[float, float]:
    """The one factor that fits best, and the relative error that it leaves."""
    value, target = (torch.cat([tensor.double().flatten() for tensor in side]) for side in (captured, reference))
    factor = float(value @ target / (target @ target))
    return factor, float((value - factor * target).norm() / value.norm())


def _is_scaled(captured: list[Tensor], reference: list[Tensor], error: float) -> bool:
    """Whether one factor explains all of the error, or nearly."""
    return error > 1e-3 and _factor(captured, reference)[1] < 1e-4


def _hint(check: Check, capture: Capture, captured: list, reference: list) -> str:
    if math.isinf(check.bound):
        return "The correct code is not finite here either: a number out of this format's range, not a wrong formula."
    if any(value is None or value.shape != target.shape for value, target in zip(captured, reference)):
        return "It is missing or has another shape."
    if check.stage == "target":
        record = capture.record
        signal, sigma = (record[f"coefficient.{name}"].view(-1, 1, 1, 1) for name in ("signal", "sigma"))
        x0, noise = record["latents"], capture.batch["noise"]
        for name, other in (("velocity", signal * noise - sigma * x0), ("clean latents", x0), ("x_t", record["x_t"])):
            if relative_error(captured, [other]) < 1e-4:
                return f"It is the {name}."
    if len(captured) == 1:
        value, target = captured[0].double(), reference[0].double()
        samples = (value - target).flatten(1).norm(dim=1) if value.ndim > 1 else (value - target).abs()
        off = (~(samples <= 1e-4 * target.norm() / len(target) ** 0.5)).nonzero().flatten().tolist()
        if 0 < len(off) <= len(samples) // 4:
            return f"Only in sample {', '.join(map(str, off[:5]))} of {len(samples)}."
    factor, left = _factor(captured, reference)
    return f"All of it is a factor of {factor:.5g}." if left < 0.02 < abs(factor - 1) else ""


def _check_start(capture: Capture) -> list[Check]:
    """What the step began with: finite weights and moments, and draws that seed and step give again, bit for bit."""
    drawn = draw(capture.config, capture.details["num_images"], capture.step, capture.details["scalars"]["retry"])
    bad = [name for name, tensor in capture.before.items()
           if not name.startswith("monitor.") and not tensor.isfinite().all()]
    hint = f"Not finite: {', '.join(bad[:3])}." if bad else ""
    return [Check("state before", "before", len(bad), 0.0, hint)] + [
        Check("draws", name, float((capture.batch[name] != tensor).double().mean()), 0.0)
        for name, tensor in drawn.items()]


@torch.no_grad()
def _check_pixels(capture: Capture, autoencoder: Autoencoder, images: Tensor | None) -> list[Check]:
    """Moments against those of the images; where they differ, the known misreadings of pixels are tried in turn."""
    if images is None:
        if "images" not in capture.batch:
            raise ValueError("the capture holds no images: pass those of its batch, in the order of batch['indices'] "
                             "and mirrored where batch['flipped'] says so")
        images = capture.batch["images"]
    wide = copy.deepcopy(autoencoder.model).double()
    pixels = to_pixels(images.to(autoencoder.model.device).double())
    reference = encode(wide, pixels).cpu()
    rounded = encode(autoencoder.model, pixels.float().to(autoencoder.model.dtype)).cpu()
    captured, dtype = capture.batch["moments"], getattr(torch, capture.details["moments_dtype"])
    same = rounded.to(dtype).float()
    bound = MARGIN * max(relative_error([same], [reference]), torch.finfo(dtype).eps / 2)
    error = relative_error([captured], [reference])
    misread = {"data range": {"in [0, 1]": (pixels + 1) / 2, "0 to 255": (pixels + 1) * 127.5},
               "channel order": {"blue first": pixels.flip(1)}}
    checks = []
    for stage, variants in misread.items():
        fits = [name for name, other in variants.items() if not torch.equal(other, pixels) and error > bound
                and relative_error([captured], [encode(wide, other).cpu()]) <= bound]
        hint = f"The moments are those of pixels {fits[0]}." if fits else ""
        checks.append(Check(stage, "moments", error if fits else 0.0, bound, hint))
    return [*checks, Check("encoder", "moments", error, bound)]
