"""The Frechet distance of two Gaussians, from their statistics."""
import math

import numpy as np
import torch

from dit_repro.evaluation.statistics import FeatureStatistics, threads_for


def frechet_distance(a: FeatureStatistics, b: FeatureStatistics) -> float:
    """|mean_a - mean_b|^2 + tr(S_a) + tr(S_b) - 2 tr((S_a S_b)^(1/2)); with Inception's pool features this is FID.

    The last trace is the sum of the singular values of A^T B, with S_a = A A^T and S_b = B B^T. No matrix square root
    and no epsilon on the diagonal, so fewer samples than dimensions is as exact as many. Raises ValueError on different
    dimensions and on fewer than two samples. Heusel et al. 2017, equation 6.
    """
    if a.dim != b.dim:
        raise ValueError(f"these features have {a.dim} and {b.dim} dimensions: they are not of one extractor and head")
    root_a, root_b = a.factor(), b.factor()  # (D, rank)
    with threads_for(a.dim):
        overlap = torch.linalg.svdvals(root_a.T @ root_b).sum()
    distance = (a.mean - b.mean).square().sum() + root_a.square().sum() + root_b.square().sum() - 2 * overlap
    return max(distance.item(), 0.0)  # rounding may leave -1e-15 where the distance is 0


def features_at_known_distance(count: int, dim: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, float]:
    """Two sets of features (N, D), float64, and their Frechet distance in closed form: what an algorithm must find.

    N may be below D. Covariances are pairs of dimensions, turned against each other so that they do not commute, in a
    basis of cosines; deviations fall as 1/k. tr((ST)^(1/2)) of 2 x 2 matrices is sqrt(tr(ST) + 2 sqrt(det(S) det(T))).
    """
    draw = np.random.default_rng(seed)
    rank = min(count - 1, dim) // 2 * 2                                       # even, below N since the mean takes one
    s, t = draw.uniform(0.5, 1.5, (2, rank)) / np.arange(1, rank + 1)         # standard deviations
    angle = draw.uniform(0, math.pi, rank // 2)
    samples = _cosines(count, rank + 1)[1:].T * math.sqrt(count - 1)          # (N, rank), each column of mean 0, std 1
    basis = _cosines(dim, rank)                                               # (rank, D)
    turned = np.empty_like(basis)
    turned[::2] = np.cos(angle)[:, None] * basis[::2] + np.sin(angle)[:, None] * basis[1::2]
    turned[1::2] = np.cos(angle)[:, None] * basis[1::2] - np.sin(angle)[:, None] * basis[::2]
    shift = draw.normal(size=dim) / (10 * math.sqrt(dim))
    (a, b), (p, q) = (np.square(spread).reshape(-1, 2).T for spread in (s, t))
    aligned = np.cos(angle) ** 2
    trace = aligned * (a * p + b * q) + (1 - aligned) * (a * q + b * p)
    exact = math.fsum([*shift ** 2, *a, *b, *p, *q, *(-2 * np.sqrt(trace + 2 * np.sqrt(a * b * p * q)))])
    return samples * s @ basis, samples * t @ turned + shift, exact


def _cosines(n: int, count: int) -> np.ndarray:
    """The first rows of the discrete cosine basis (count, n): orthonormal, the first of them constant."""
    rows = np.cos(np.arange(count)[:, None] * (np.arange(n) + 0.5) * (math.pi / n)) * math.sqrt(2 / n)
    rows[0] /= math.sqrt(2)
    return rows
