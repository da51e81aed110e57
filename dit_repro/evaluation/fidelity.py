"""Inception Score, precision and recall, kernel distance: as the ADM evaluator computes them, and strictly.

Mode "adm" gives the published numbers: file-order chunks and float16 distances. Mode "strict" takes out both:
images are shuffled first, and distances are float32. The difference between the two is worth printing.
"""
import math

import torch
from torch import Tensor

from dit_repro.evaluation.statistics import check_features


def _is_strict(mode: str) -> bool:
    if mode not in ("adm", "strict"):
        raise ValueError(f"mode {mode!r}: expected 'adm' or 'strict'")
    return mode == "strict"


def _pair(generated, reference) -> tuple[Tensor, Tensor]:
    x, y = check_features(generated, "generated features"), check_features(reference, "reference features")
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"generated features have {x.shape[1]} dimensions, reference features {y.shape[1]}")
    return x, y


def inception_score(logits, mode: str = "adm", chunk: int = 5_000, seed: int = 0) -> float:
    """exp E KL(p(y|x) || p(y)) of logits (N, K), the mean over chunks of 5,000. Salimans et al. 2016, equation in 4.

    Mode "adm" cuts chunks in file order, so a file sorted by class scores far too low; "strict" shuffles by `seed`.
    """
    logits = check_features(logits, "logits")
    order = torch.arange(len(logits))
    if _is_strict(mode):
        order = torch.randperm(len(logits), generator=torch.Generator().manual_seed(seed))
    scores = []
    for rows in order.split(chunk):
        part = logits[rows].double().log_softmax(1)         # (n, K); the log of a softmax is -inf on sure images
        marginal = part.logsumexp(0) - math.log(len(part))  # (K,) log p(y)
        scores.append((part.exp() * (part - marginal)).sum(1).mean().exp())
    return torch.stack(scores).mean().item()


def _squared_distances(x: Tensor, y: Tensor, half: bool) -> Tensor:
    """(n, m) float32 squared distances; in `half` every step is rounded to float16, unless one overflows."""
    if half:
        u, v = x.half(), y.half()
        product = (u.float() @ v.float().T).half()  # products of halves are summed in float32, as matrix units do
        u_norm, v_norm = ((w * w).float().sum(1).half() for w in (u, v))
        distances = u_norm[:, None] - 2 * product + v_norm
        if torch.isfinite(distances).all():
            return distances.clamp(min=0).float()
    return (x.square().sum(1)[:, None] - 2 * x @ y.T + y.square().sum(1)).clamp(min=0)


def _radii(x: Tensor, k: int, block: int, half: bool) -> Tensor:
    """(N,) squared distance of each row to its k-th nearest other row."""
    radii = []
    for rows in x.split(block):
        nearest = torch.cat([d.topk(min(k + 1, d.shape[1]), largest=False).values for d in
                             (_squared_distances(rows, columns, half) for columns in x.split(block))], 1)
        radii.append(nearest.kthvalue(k + 1).values)  # the nearest of all is the row itself
    return torch.cat(radii)


def _share_inside(x: Tensor, centers: Tensor, radii: Tensor, block: int, half: bool) -> float:
    inside = [torch.stack([(_squared_distances(rows, c, half) <= r).any(1) for c, r in
                           zip(centers.split(block), radii.split(block))]).any(0) for rows in x.split(block)]
    return torch.cat(inside).double().mean().item()


def precision_recall(generated, reference, mode: str = "adm", k: int = 3, block: int = 2_500) -> tuple[float, float]:
    """(precision, recall): the share of one set inside the k-nearest-neighbor balls of the other. Kynkaanniemi 2019.

    Features (N, D) and (M, D). ADM takes 50,000 generated and 10,000 reference images; its float16 distances move the
    third decimal. Memory is a few block x block matrices. Raises ValueError with k images or fewer on a side.
    """
    x, y = (features.float() for features in _pair(generated, reference))
    if min(len(x), len(y)) <= k:
        raise ValueError(f"precision and recall with k={k} need more than {k} images a side, "
                         f"found {len(x)} and {len(y)}")
    half = not _is_strict(mode)
    return (_share_inside(x, y, _radii(y, k, block, half), block, half),
            _share_inside(y, x, _radii(x, k, block, half), block, half))


def kernel_distance(generated, reference, subsets: int = 100, subset_size: int = 1_000,
                    seed: int = 0) -> tuple[float, float]:
    """KID: unbiased MMD^2 under the kernel (x.y / D + 1)^3, as mean and standard deviation over random subsets.

    Needs no large N: its expectation does not depend on the number of images. Binkowski et al. 2018, section 4.
    """
    x, y = _pair(generated, reference)
    if min(len(x), len(y)) < subset_size or subset_size < 2:
        raise ValueError(f"subset_size {subset_size}: expected 2 to {min(len(x), len(y))}, the smaller set")
    generator = torch.Generator().manual_seed(seed)

    def kernel(u: Tensor, v: Tensor) -> Tensor:
        return (u @ v.T / u.shape[1] + 1) ** 3

    values = []
    for _ in range(subsets):
        u, v = (z[torch.randperm(len(z), generator=generator)[:subset_size]].double() for z in (x, y))
        own = sum(k.sum() - k.trace() for k in (kernel(u, u), kernel(v, v)))
        values.append(own / (subset_size * (subset_size - 1)) - 2 * kernel(u, v).mean())
    values = torch.stack(values)
    return values.mean().item(), values.std(correction=0).item()
