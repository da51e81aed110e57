"""Exposure bias: what the network is given while sampling, held against what it was given in training."""
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from torch import Tensor

from dit_repro.diffusion import NoiseSchedule

from .sampler import State

PERCENTILES = (50, 99, 99.9, 100)
NOISE_LIMIT = 6.0  # deviations; of normal noise one value in 500 million lies beyond


@dataclass(frozen=True)
class Trace:
    """Trajectories of N images over S steps, reduced to statistics.

    steps: one row a step. timestep; norm, the root mean square of the network's input; variance, over images, mean of
    the positions; forward_norm and forward_variance, the same of noised real latents; norm_ratio and variance_ratio,
    and variance_ratio_error, its standard error over the sampled images.
    exits: timesteps, NaN where it never happens. `input`, at which the network's input first has a value that the
    forward process does not reach; `x0`, from which on predicted x0 has one beyond the data, to the end. Alone, x0
    beyond the data means little: where all is noise, good trajectories predict it too, and come back.
    x0: (S, N, 4), PERCENTILES of each image's predicted |x0|, before any transform; 100 is the largest.
    """
    steps: pd.DataFrame
    x0: np.ndarray
    exits: pd.DataFrame  # one row an image
    latents: Tensor      # (N, C, H, W), where the trajectories ended


def trace(states: Iterable[State], schedule: NoiseSchedule, latents: Tensor, limit: float) -> Trace:
    """Follow `sample_states` to its end and keep statistics.

    schedule: that of training, unrespaced. latents: (M, C, H, W) of real images, their classes in the same proportions
    as the samples'. limit: the largest |latent| that counts as data, such as CollapseDetector's. The forward process
    needs no draws: x_t has variance a Var(x_0) + 1 - a, mean square a E(x_0^2) + 1 - a, and no value beyond
    sqrt(a) limit + sqrt(1 - a) NOISE_LIMIT.
    """
    if schedule.num_steps != schedule.num_train_steps:
        raise ValueError(f"trace: {schedule}, expected the full schedule of training")
    real = latents.double()
    real_variance, real_square = real.var(0).mean().item(), real.square().mean().item()
    sigmas = ((1 - schedule.alphas_cumprod) / schedule.alphas_cumprod).sqrt().numpy()
    rows, percentiles, reached, finished = [], [], [], None
    for state in states:
        if len(state.x_t) < 2:
            raise ValueError("trace: 1 image, expected at least 2: the variance is taken over images")
        x = state.x_t.double()
        a = 1 / (1 + np.interp(state.timestep, np.arange(len(sigmas)), sigmas) ** 2)  # solvers may stop in between
        n = len(x)
        deviations = (x - x.mean(0)).square().flatten(1).mean(1) * n / (n - 1)  # (N,); their mean is the variance
        rows.append((state.timestep, x.square().mean().sqrt().item(), deviations.mean().item(),
                     deviations.std().item() / n**0.5, np.sqrt(a * real_square + 1 - a), a * real_variance + 1 - a))
        reached.append((x.abs().flatten(1).amax(1) <= np.sqrt(a) * limit + np.sqrt(1 - a) * NOISE_LIMIT).cpu().numpy())
        x0 = state.x0.abs().flatten(1).cpu().numpy()  # (N, D)
        percentiles.append(np.percentile(x0, PERCENTILES, axis=1).T)
        finished = state.sample
    if finished is None:
        raise ValueError("trace: no states; sample_states can be followed once")
    steps = pd.DataFrame(rows, columns=["timestep", "norm", "variance", "error", "forward_norm", "forward_variance"])
    error = steps.pop("error")
    steps = steps.assign(norm_ratio=steps.norm / steps.forward_norm,
                         variance_ratio=steps.variance / steps.forward_variance,
                         variance_ratio_error=error / steps.forward_variance)
    x0, reached = np.stack(percentiles), np.stack(reached)
    stayed = np.cumprod(~(x0[::-1, :, -1] <= limit), axis=0).sum(0)  # (N,): steps outside at the end; NaN is outside
    timesteps = np.append(steps.timestep, np.nan)
    exits = pd.DataFrame({"input": timesteps[np.cumprod(reached, axis=0).sum(0)],
                          "x0": timesteps[len(x0) - stayed]})
    return Trace(steps, x0, exits, finished)
