"""Two ways to be wrong that no loss shows: ignoring the label, and repeating the training images."""
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Information(NamedTuple):
    """What a sample says about the label that was asked for."""
    bits: float      # mutual information of label and judged class; log2 of the number of classes at most
    chance: float    # the 95th percentile of the same with the labels shuffled: below it the label has no effect
    p_value: float


def condition_information(judged, labels, draws: int = 200, seed: int = 0) -> Information:
    """Mutual information between labels (N,) and the classes (N,) that a judge sees in their samples, in bits.

    A model that ignores its condition gives the same mixture for every label: what is left then is the bias of a
    finite sample, and shuffled labels measure it. Raises ValueError for other shapes.
    """
    judged, labels = np.asarray(judged), np.asarray(labels)
    if judged.shape != labels.shape or judged.ndim != 1 or not len(labels):
        raise ValueError(f"condition: {judged.shape} judged classes for {labels.shape} labels, expected (N,) of each")
    generator = np.random.default_rng(seed)
    bits = _mutual_information(judged, labels)
    shuffled = [_mutual_information(judged, generator.permutation(labels)) for _ in range(draws)]
    p_value = (1 + sum(other >= bits for other in shuffled)) / (1 + draws)
    return Information(bits, float(np.quantile(shuffled, 0.95)), p_value)


def _mutual_information(a: np.ndarray, b: np.ndarray) -> float:
    _, a = np.unique(a, return_inverse=True)
    _, b = np.unique(b, return_inverse=True)
    joint = np.zeros((a.max() + 1, b.max() + 1))
    np.add.at(joint, (a, b), 1 / len(a))
    independent = joint.sum(1, keepdims=True) * joint.sum(0)
    seen = joint > 0
    return float((joint[seen] * np.log2(joint[seen] / independent[seen])).sum())


class Copies(NamedTuple):
    """How near samples come to the training images, beside how near other real images come."""
    share: float       # of samples nearer to a training image than all but `quantile` of held-out images
    threshold: float   # that distance
    ratio: float       # median distance of samples over that of held-out images; below 1 the model leans on its data


def find_copies(samples: Tensor, train: Tensor, held_out: Tensor | None = None, quantile: float = 0.01) -> Copies:
    """Nearest-neighbor test on features (N, D), (M, D), (K, D): held-out images say what distance is ordinary.

    Of a model as independent of the training images as held-out ones are, a share of `quantile` is called copied.
    Without held-out images, each training image's distance to the nearest other one takes their place.
    Raises ValueError with fewer than 1 / quantile images to say what is ordinary.
    """
    others = train if held_out is None else held_out
    if len(others) < 1 / quantile:
        raise ValueError(f"copies: {len(others)} images to compare with, quantile={quantile} needs "
                         f"{round(1 / quantile)}")
    usual = nearest_distance(others, train, itself=held_out is None).numpy()
    measured = nearest_distance(samples, train).numpy()
    threshold = float(np.quantile(usual, quantile, method="lower"))
    return Copies(float((measured < threshold).mean()), threshold, float(np.median(measured) / np.median(usual)))


def nearest_distance(features: Tensor, reference: Tensor, itself: bool = False, block: int = 1_024) -> Tensor:
    """Euclidean distance of each of features (N, D) to the nearest of reference (M, D): (N,) float64.

    With `itself` the two are the same set, and an image is not its own neighbor.
    """
    reference, nearest = reference.double(), []
    for first, rows in zip(range(0, len(features), block), features.split(block)):
        distances = torch.cdist(rows.double(), reference)
        if itself:
            distances[torch.arange(len(rows)), first + torch.arange(len(rows))] = torch.inf
        nearest.append(distances.amin(1))
    return torch.cat(nearest)
