"""One class at a time: whose samples are degenerate, is there a second kind of sample, which class is far away."""
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from dit_repro.evaluation.frechet import frechet_distance
from dit_repro.evaluation.statistics import FeatureStatistics, check_features, threads_for


def replay_labels(seed: int, count: int, num_classes: int, batch_size: int | None = None,
                  noise_shape: Sequence[int] | None = None, device: str = "cpu") -> Tensor:
    """Labels (N,) int64 that a seeded script drew for samples whose labels were not kept.

    All at once, or `batch_size` at a time. `noise_shape` (C, H, W) is for scripts that draw the starting noise of a
    batch from the same generator just before its labels, as DiT's sample_ddp.py does. A GPU's generator gives other
    numbers than the CPU's, so pass the `device` that sampled. Check the result: a classifier must agree with it.
    """
    generator = torch.Generator(device).manual_seed(seed)
    labels = []
    for _ in range(0, count, batch_size or count):
        n = batch_size or count  # the last batch is drawn whole too, and cut
        if noise_shape is not None:
            torch.randn(n, *noise_shape, generator=generator, device=device)
        labels.append(torch.randint(0, num_classes, (n,), generator=generator, device=device))
    return torch.cat(labels)[:count].cpu()


def pixel_std(images: Tensor) -> Tensor:
    """Standard deviation of all values of each image uint8 (N, 3, H, W): (N,) float64, in units of the full range.

    An image of one color has 0. A cheap sign of collapse, no measure of quality.
    """
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise ValueError(f"expected uint8 images of shape (N, 3, H, W), found {images.dtype} {tuple(images.shape)}")
    return torch.cat([batch.flatten(1).double().std(1, correction=0) / 255 for batch in images.split(256)])


def rank_classes(values, labels, class_names: Sequence[str] | None = None) -> pd.DataFrame:
    """Mean, lowest and count of values (N,) for each class of labels (N,), the lowest mean first."""
    values, labels = np.asarray(values, np.float64), np.asarray(labels)
    if values.shape != labels.shape or values.ndim != 1:
        raise ValueError(f"{values.shape} values for {labels.shape} labels, expected (N,) of each")
    table = pd.DataFrame({"class": labels, "value": values}).groupby("class")["value"].agg(
        mean="mean", lowest="min", count="count").sort_values("mean")
    return table.rename(index=dict(enumerate(class_names or [])))


class SecondMode(NamedTuple):
    """Whether values have more than one mode."""
    dip: float      # distance to the nearest distribution of one mode, 0 to 0.25
    p_value: float  # of as large a dip with one mode
    split: float    # where values depart most from one mode: the edge between the second mode and the first
    below: float    # share of values up to there


def second_mode(values, draws: int = 200, seed: int = 0) -> SecondMode:
    """The dip test of one mode against more, for values (N,). Hartigan and Hartigan 1985, Annals of Statistics 13.

    Nothing is assumed about the shape of a mode: uniform values, the hardest case, give the p-value, so outliers and
    skew are no second mode. It sees a group apart of a share w of the values where w is above 1 / sqrt(N).
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or len(values) < 10 or not np.isfinite(values).all() or values.std() == 0:
        raise ValueError(f"a test for modes needs at least 10 finite values (N,) that are not all equal, found "
                         f"{values.shape}")
    generator = np.random.default_rng(seed)
    x = np.sort(values + 1e-6 * values.std() * generator.random(len(values)))  # equal values become a narrow mode
    dip, i = _dip(x)
    chance = [_dip(np.sort(generator.random(len(x))))[0] for _ in range(draws)]
    return SecondMode(dip, (1 + sum(other >= dip for other in chance)) / (1 + draws), float(x[i]), (i + 1) / len(x))


def _dip(x: np.ndarray) -> tuple[float, int]:
    """The dip of sorted, distinct x (N,), and the index where it is reached."""
    n, low, high, most, where = len(x), 0, len(x) - 1, 0.0, 0
    y = np.arange(n) / n
    while True:
        part = slice(low, high + 1)
        under, over = _hull(x[part], y[part], True), _hull(x[part], y[part], False)
        i = (over - under).argmax()
        if (over - under)[i] <= most:
            break
        left = np.flatnonzero(y[part][:i + 1] - under[:i + 1] < 1e-12)[-1]      # the modal interval: from the last
        right = i + np.flatnonzero(over[i:] - y[part][i:] < 1e-12)[0]           # touch on the left to the first right
        for away in (np.r_[(y[part] - under)[:left + 1], np.zeros(high - low - left)],
                     np.r_[np.zeros(right), (over - y[part])[right:]]):
            if away.max() > most:
                most, where = away.max(), low + away.argmax()
        if (left, right) == (0, high - low):
            break
        low, high = low + left, low + right
    return float(most + 1 / n) / 2, int(where)


def _hull(x: np.ndarray, y: np.ndarray, convex: bool) -> np.ndarray:
    """Values at x of the largest convex function under the points (x, y), or the smallest concave one above them."""
    from scipy.optimize import isotonic_regression
    if len(x) < 2:
        return y
    width = np.diff(x)
    slopes = isotonic_regression(np.diff(y) / width, weights=width, increasing=convex).x
    return y[0] + np.r_[0.0, np.cumsum(slopes * width)]


def check_labels(labels, count: int) -> Tensor:
    """Labels (count,) as a tensor; ValueError for another shape, or where they are not whole numbers."""
    labels = torch.as_tensor(labels)
    if labels.shape != (count,) or labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels of shape {tuple(labels.shape)}, {labels.dtype}: expected ({count},) integers, "
                         "one for each image")
    return labels


def measurable_classes(labels: Tensor, reference_labels: Tensor) -> list[int]:
    """The classes that `class_frechet` measures: those of at least 2 generated and 4 reference images."""
    counts, reference_counts = (dict(zip(*(column.tolist() for column in own.unique(return_counts=True))))
                                for own in (labels, reference_labels))
    return [label for label, count in counts.items() if count >= 2 and reference_counts.get(label, 0) >= 4]


def class_frechet(features, labels, reference, reference_labels, class_names: Sequence[str] | None = None,
                  seed: int = 0) -> pd.DataFrame:
    """Frechet distance of each class and its noise floor: features (N, D), labels (N,), the same of a reference (M, D).

    A few hundred images a class lift a distance far above zero, and more for some classes than for others. So real
    images of the class are halved at random: `floor` is the distance between the halves, `distance` that of as many
    generated images to the second half. Only `excess`, their difference, compares between classes. Classes that are not
    among `measurable_classes` are left out; ValueError where that leaves none.
    """
    x, y = check_features(features, "features"), check_features(reference, "reference features")
    labels, reference_labels = check_labels(labels, len(x)), check_labels(reference_labels, len(y))
    if class_names and not 0 <= labels.min() <= labels.max() < len(class_names):
        raise ValueError(f"labels from {labels.min()} to {labels.max()} and {len(class_names)} class names")
    generator, rows = torch.Generator().manual_seed(seed), []
    for label in measurable_classes(labels, reference_labels):
        generated, real = (z[own == label] for z, own in ((x, labels), (y, reference_labels)))
        n = min(len(generated), len(real) // 2)
        real = real[torch.randperm(len(real), generator=generator)]
        a, b, c = generated[:n], real[:n], real[n:]
        rows.append({"class": class_names[label] if class_names else label, "images": n,
                     "distance": _distance(a, c), "floor": _distance(b, c)})
    if not rows:
        raise ValueError(f"no class has 2 of the {len(x)} generated and 4 of the {len(y)} reference images")
    table = pd.DataFrame(rows).set_index("class")
    return table.assign(excess=table.distance - table.floor).sort_values("excess", ascending=False)


def _distance(x: Tensor, y: Tensor) -> float:
    """Frechet distance of few features (n, D) to others (m, D): with n or m below D, an (n, m) matrix is enough."""
    if min(len(x), len(y)) >= x.shape[1]:
        return frechet_distance(*(FeatureStatistics(x.shape[1]).update(z) for z in (x, y)))
    a, b = ((z.double() - z.double().mean(0)) / (len(z) - 1) ** 0.5 for z in (x, y))
    shift = x.double().mean(0) - y.double().mean(0)
    with threads_for(min(len(a), len(b))):
        overlap = torch.linalg.svdvals(a @ b.T).sum()
    distance = sum(z.square().sum() for z in (shift, a, b)) - 2 * overlap
    return max(distance.item(), 0.0)
