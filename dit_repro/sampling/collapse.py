"""Which samples are no images: statistics of pixels and latents, held against the same statistics of real images."""
import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

STATISTICS = ["mean_pixel", "pixel_std", "saturated_share", "largest_latent", "out_of_range_share", "latent_std"]
# Kind of collapse: the statistic that shows it, and the side on which real images are not found.
KINDS = {
    "solid": ("pixel_std", "low"),
    "saturated": ("saturated_share", "high"),
    "out_of_range": ("out_of_range_share", "high"),
    "low_variance": ("latent_std", "low"),
}


@dataclass(frozen=True)
class CollapseDetector:
    """A sample has collapsed in a kind where its statistic lies beyond all but `quantile` of real images.

    limit: all but `quantile` of real images have every |latent| within it; a range for clamp_x0 too. thresholds: one a
    kind. Both are measured by `fit`, so on other real images each kind is wrong about `quantile` of the time.
    """
    quantile: float
    limit: float
    thresholds: dict[str, float]

    @classmethod
    def fit(cls, images: Tensor, latents: Tensor, quantile: float = 0.001) -> "CollapseDetector":
        """From latents (N, C, h, w) of real images and what the autoencoder decodes from them, (N, 3, H, W) uint8.

        Decoded, not original: samples come through the decoder too. Raises ValueError with fewer than 1 / quantile.
        """
        if not 0 < quantile < 0.5:
            raise ValueError(f"collapse detector: quantile={quantile}, expected above 0 and below 0.5, such as 0.001")
        _check(images, latents)
        needed = math.ceil(1 / quantile)
        if len(latents) < needed:
            raise ValueError(f"collapse detector: {len(latents)} real images, quantile={quantile} needs at least "
                             f"{needed}; give more, or a larger quantile")
        if not bool(latents.isfinite().all()):
            raise ValueError("collapse detector: NaN or infinity among the latents of real images")
        limit = _beyond(latents.abs().flatten(1).amax(1).double().cpu().numpy(), "high", quantile)
        measured = _statistics(images, latents, limit)
        return cls(quantile, limit, {kind: _beyond(measured[statistic].to_numpy(), side, quantile)
                                     for kind, (statistic, side) in KINDS.items()})

    def statistics(self, images: Tensor, latents: Tensor) -> pd.DataFrame:
        """One row an image, pixels in 0..255: mean_pixel, pixel_std (over positions, mean of the channels),
        saturated_share (of values at 0 or 255), largest_latent (absolute), out_of_range_share (of latents beyond
        `limit`) and latent_std (over positions, mean of the channels)."""
        _check(images, latents)
        return _statistics(images, latents, self.limit)

    def detect(self, images: Tensor, latents: Tensor) -> pd.DataFrame:
        """One row of booleans an image: each kind, and `collapsed` where there is any."""
        return self.judge(self.statistics(images, latents))

    def judge(self, statistics: pd.DataFrame) -> pd.DataFrame:
        """The same from a frame that `statistics` made."""
        found = {}
        for kind, (statistic, side) in KINDS.items():
            values, threshold = statistics[statistic], self.thresholds[kind]
            found[kind] = ~(values >= threshold if side == "low" else values <= threshold)  # so NaN has collapsed
        found = pd.DataFrame(found)
        return found.assign(collapsed=found.any(axis=1))

    def false_positive_rate(self, images: Tensor, latents: Tensor) -> pd.DataFrame:
        """On real images that `fit` has not seen, a row for each kind and for `collapsed`: images, count, rate and its
        Wilson interval low..high."""
        found = self.detect(images, latents)
        rows = [(len(found), count, count / len(found), *wilson_interval(count, len(found)))
                for count in map(int, found.sum())]
        return pd.DataFrame(rows, index=found.columns, columns=["images", "count", "rate", "low", "high"])


def wilson_interval(count: int, total: int, level: float = 0.95) -> tuple[float, float]:
    """Interval for a share, from `count` of `total`; at 0 and `total` it still has a width (Wilson 1927)."""
    from scipy.stats import binomtest
    interval = binomtest(count, total).proportion_ci(level, method="wilson")
    return float(interval.low), float(interval.high)


def difference_interval(before: int, after: int, total: int, level: float = 0.95) -> tuple[float, float]:
    """Interval for the fall of a share, `before` of `total` to `after` of `total` (Newcombe 1998, method 10).

    It takes the two sets as independent; with the same seeds in both the difference is known better than this.
    """
    p, q = before / total, after / total
    (low_p, high_p), (low_q, high_q) = wilson_interval(before, total, level), wilson_interval(after, total, level)
    return p - q - math.hypot(p - low_p, high_q - q), p - q + math.hypot(high_p - p, q - low_q)


def _beyond(values: np.ndarray, side: str, quantile: float) -> float:
    """The value that at most `quantile` of `values` lie strictly beyond."""
    sign = 1 if side == "low" else -1
    return float(sign * np.quantile(sign * values, quantile, method="inverted_cdf"))


def _statistics(images: Tensor, latents: Tensor, limit: float) -> pd.DataFrame:
    parts = []
    for pixels, x in zip(images.split(1024), latents.split(1024)):
        saturated = (pixels == 0) | (pixels == 255)
        pixels, x = pixels.float(), x.float()
        parts.append(torch.stack([
            pixels.mean((1, 2, 3)), pixels.std((2, 3)).mean(1), saturated.float().mean((1, 2, 3)),
            x.abs().amax((1, 2, 3)), (~(x.abs() <= limit)).float().mean((1, 2, 3)),  # so NaN is out of range
            x.std((2, 3)).mean(1)], 1).double().cpu())
    return pd.DataFrame(torch.cat(parts).numpy(), columns=STATISTICS)


def _check(images: Tensor, latents: Tensor) -> None:
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"collapse detector: images {images.dtype} {tuple(images.shape)}, expected uint8 (N, 3, H, W)")
    if latents.ndim != 4 or len(latents) != len(images) or len(images) == 0:
        raise ValueError(f"collapse detector: latents {tuple(latents.shape)} for {len(images)} images, expected the "
                         "(N, C, h, w) that they were decoded from")
