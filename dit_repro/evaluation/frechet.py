"""The Frechet distance of two Gaussians, from their statistics."""
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
