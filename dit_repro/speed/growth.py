"""How a step's time and memory grow with the batch, the depth, the width and the tokens."""
import gc
import statistics
from dataclasses import dataclass, replace

import numpy as np
import torch

from dit_repro.models import DiTConfig
from dit_repro.progress import progress
from dit_repro.speed.ladder import Bench, Settings, Step
from dit_repro.speed.operations import measure_operations, shares

AXES = ("batch", "depth", "width", "tokens")


@dataclass(frozen=True)
class Size:
    """One step: a network of heads 32 wide and patches of 2 by 2, the latents' side, and the images of a step."""
    batch: int
    depth: int
    width: int
    tokens: int       # a square number

    def grown(self, axis: str, factor: int) -> "Size":
        """`factor` times as large along one axis; tokens grow by its square, since the latents' side does."""
        return replace(self, **{axis: getattr(self, axis) * (factor**2 if axis == "tokens" else factor)})

    def step(self, device: torch.device, settings: Settings) -> Step:
        config = DiTConfig(self.depth, self.width, self.width // 32, patch_size=2)
        return Step(Bench(config, self.batch, device, input_size=2 * round(self.tokens**0.5)), settings)


@dataclass(frozen=True)
class Growth:
    """One axis, point by point."""
    axis: str
    values: list[int]             # of the axis
    seconds: list[float]          # a step, median
    peak_bytes: list[int]         # weights, moments and average included
    attention: list[float]        # along tokens: share of the time that is attention, the products around it not

    def exponent(self, what: str) -> float:
        """The slope of `seconds` or `peak_bytes` over the axis in logarithms, least squares over all points."""
        return float(np.polyfit(np.log(self.values), np.log(getattr(self, what)), 1)[0])


def measure_growth(base: Size, device: str | torch.device, factors: tuple[int, ...] = (1, 2, 4, 8), repeats: int = 3,
                   settings: Settings | None = None) -> list[Growth]:
    """Time and memory along each of AXES, the other three held at `base`; along tokens also attention's share."""
    device, found = torch.device(device), []
    settings = settings or Settings(threads=torch.get_num_threads(), fused=True, foreach_ema=True)
    points = [(axis, factor) for axis in AXES for factor in factors]
    for axis, factor in progress(points, desc="growth", unit="size"):
        if factor == factors[0]:
            found.append(Growth(axis, [], [], [], []))
        gc.collect()   # the size before waits in reference cycles
        size = base.grown(axis, factor)
        step = size.step(device, settings)
        step.warm_up(parity=False)
        with step.active():
            seconds = statistics.median(step.timed(step.inner) for _ in range(repeats))
            if axis == "tokens":
                parts = shares(measure_operations(step, device, repeats=1))
                found[-1].attention.append(parts.get("attention", 0.0))
        growth = found[-1]
        for values, value in ((growth.values, getattr(size, axis)), (growth.seconds, seconds),
                              (growth.peak_bytes, step.peak_bytes)):
            values.append(value)
        step = None   # or it would still be there beside the next one
    return found
