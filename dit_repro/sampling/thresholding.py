"""x0 transforms: what is done at each step to the image that the model predicts, before the sampler goes on from it."""
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor


def clamp_x0(limit: float) -> Callable[[Tensor], Tensor]:
    """Clamp predicted x0 to [-limit, limit], in scaled latents; take the limit from those of real images."""
    if not limit > 0:
        raise ValueError(f"clamp_x0: limit={limit}, expected a number above 0")
    return partial(torch.clamp, min=-limit, max=limit)


def dynamic_threshold(percentile: float, floor: float) -> Callable[[Tensor], Tensor]:
    """Imagen's dynamic thresholding (arXiv 2205.11487, section 2.3), for data in [-floor, floor].

    Where an image's percentile of |x0| is above `floor`, x0 is clamped to it, then scaled so that it falls on `floor`.
    """
    if not 0 < percentile <= 100:
        raise ValueError(f"dynamic_threshold: percentile={percentile}, expected up to 100, such as 99.5")
    if not floor > 0:
        raise ValueError(f"dynamic_threshold: floor={floor}, expected a number above 0")
    return partial(_threshold, percentile=percentile, floor=floor)


def _threshold(x0: Tensor, percentile: float, floor: float) -> Tensor:
    limit = x0.abs().flatten(1).quantile(percentile / 100, dim=1).clamp(min=floor)  # (N,)
    limit = limit.view(-1, *[1] * (x0.ndim - 1))  # (N, 1, 1, 1)
    return x0.clamp(-limit, limit) * (floor / limit)
