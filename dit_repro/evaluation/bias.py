"""How sure a Frechet distance is, and how far the number of samples lifts it: all from one array of features."""
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from dit_repro.evaluation.frechet import frechet_distance
from dit_repro.evaluation.statistics import FeatureStatistics, check_features, threads_for


def influence(features, reference: FeatureStatistics, block: int = 4_096) -> Tensor:
    """What each image adds to the Frechet distance of features (N, D) to a reference: (N,) float64, to first order.

    The derivative of the distance in the weight of an image, up to a constant. Images of the largest values are what
    makes a set look wrong to the metric.
    """
    x = check_features(features)
    statistics = FeatureStatistics(x.shape[1])
    for rows in x.split(block):
        statistics.update(rows)
    a, b = statistics.factor(), reference.factor()               # (D, rank)
    with threads_for(statistics.dim):
        product = b.T @ a
        values, vectors = torch.linalg.eigh(product @ product.T)  # several times faster than svd, and exact enough here
        kept = values > values[-1:] * 1e-12
        root = b @ (vectors[:, kept] / values[kept] ** 0.25)      # root root^T carries one Gaussian onto the other
        shift = 2 * (statistics.mean - reference.mean)
        return torch.cat([centered @ shift + centered.square().sum(1) - (centered @ root).square().sum(1)
                          for centered in (rows.double() - statistics.mean for rows in x.split(block))])


def standard_error(features, reference: FeatureStatistics) -> float:
    """Standard error of the Frechet distance of features (N, D) to a fixed reference, from one pass and no redrawing.

    The spread of `influence` over sqrt(N). It agrees with the bootstrap where the distance is far above its floor; on
    the floor, where the first order vanishes, it is up to half too large.
    """
    return (influence(features, reference).std() / len(features) ** 0.5).item()


def bootstrap_interval(features, reference: FeatureStatistics, replicates: int = 200, level: float = 0.95,
                       seed: int = 0) -> tuple[float, float]:
    """Interval of the Frechet distance of features (N, D) to a fixed reference, over redrawing the N images.

    Drawing with replacement repeats images, which biases every replicate upwards by about as much again as N already
    does. Only their spread is used: it is centered on the measured distance.
    """
    x = check_features(features).double()
    generator = torch.Generator().manual_seed(seed)
    draws = [frechet_distance(FeatureStatistics(x.shape[1]).update(
        x[torch.randint(len(x), (len(x),), generator=generator)]), reference) for _ in range(replicates)]
    measured = frechet_distance(FeatureStatistics(x.shape[1]).update(x), reference)
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2]) - np.mean(draws) + measured
    return float(max(low, 0.0)), float(high)


def distance_by_count(features, reference: FeatureStatistics, counts: Sequence[int], repeats: int = 4,
                      seed: int = 0) -> np.ndarray:
    """Frechet distance of random subsets of features (N, D) to a reference: (len(counts), repeats) float64.

    A repeat is one shuffle; its subsets are its first 1,000, 2,000 ... rows. Raises ValueError on a count above N.
    """
    def distance(shuffled, count):
        return frechet_distance(FeatureStatistics(shuffled.shape[1]).update(shuffled[:count]), reference)

    return _over_shuffles(distance, features, 1, counts, repeats, seed)


def noise_floor(features, counts: Sequence[int], repeats: int = 4, seed: int = 0) -> np.ndarray:
    """Frechet distance between two disjoint random subsets of features (N, D), equally many in each.

    (len(counts), repeats) float64. With real features this is what a perfect generator would score. Raises ValueError
    on a count above N / 2.
    """
    def distance(shuffled, count):
        halves = shuffled[:2 * count].split(count)
        return frechet_distance(*(FeatureStatistics(half.shape[1]).update(half) for half in halves))

    return _over_shuffles(distance, features, 2, counts, repeats, seed)


def _over_shuffles(distance: Callable[[Tensor, int], float], features, sides: int, counts: Sequence[int], repeats: int,
                   seed: int) -> np.ndarray:
    """distance(shuffled features, count), which looks at their first `sides` times `count` rows, for each pair."""
    x = check_features(features).double()
    if sides * max(counts) > len(x) or min(counts) < 2:
        each = "" if sides == 1 else f" for {sides} disjoint sets"
        raise ValueError(f"counts must be from 2 to {len(x) // sides}, with {len(x)} features given{each}, found "
                         f"{list(counts)}")
    generator = torch.Generator().manual_seed(seed)
    shuffles = (x[torch.randperm(len(x), generator=generator)] for _ in range(repeats))
    return np.array([[distance(shuffled, count) for count in counts] for shuffled in shuffles]).T


def expected_floor(statistics: FeatureStatistics, count: int) -> float:
    """The noise floor at `count` images a side, to first order in 1/N, from the variances of normal features alone.

    2 tr(S) / N for the means, and sum over i, j of a b (1 + [i = j]) / (a + b) / N for the covariances, with a and b
    the eigenvalues i and j: for D independent features of variance one, (2 D + D (D + 1) / 2) / N.
    """
    with threads_for(statistics.dim):
        values = torch.linalg.eigvalsh(statistics.covariance).clamp(min=0)
    values = values[values > values[-1] * 1e-12]
    pairs = values[:, None] * values / (values[:, None] + values)
    return ((2 * values.sum() + pairs.sum() + pairs.trace()) / count).item()


def extrapolate(counts: Sequence[int], distances) -> dict[str, float]:
    """The distance at infinitely many samples, by least squares in 1/N: {"linear": .., "quadratic": ..}.

    `distances` is (len(counts),), a mean over repeats. Removes the bias of the generated side alone; report both fits,
    since N times the bias is not constant below about 5,000 samples. Chong and Forsyth 2020.
    """
    if len(set(counts)) < 3:
        raise ValueError(f"a quadratic in 1/N needs at least 3 different counts, found {list(counts)}")
    inverse = 1 / np.asarray(counts, dtype=np.float64)
    return {name: float(np.polynomial.Polynomial.fit(inverse, distances, degree)(0.0))
            for name, degree in (("linear", 1), ("quadratic", 2))}
