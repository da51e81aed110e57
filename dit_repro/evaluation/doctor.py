"""Plant every mistake that others made with FID, and measure what it does to a score. Then re-score known files."""
import copy
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from dit_repro.evaluation.bias import influence
from dit_repro.evaluation.features import FeatureExtractor, full_float32
from dit_repro.evaluation.fidelity import inception_score
from dit_repro.evaluation.frechet import frechet_distance
from dit_repro.evaluation.image_sets import open_images
from dit_repro.evaluation.per_class import check_labels, class_frechet, measurable_classes
from dit_repro.evaluation.scores import Scores
from dit_repro.evaluation.statistics import FeatureStatistics

ANCHORS = {  # (expected, tolerance) of public sample files, from the README of guided-diffusion, measured in TensorFlow
    "ADM-G+U 256": {"frechet": (3.94256, 0.005), "spatial_frechet": (6.14043, 0.005), "inception_score": (215.837, 0.3),
                    "precision": (0.8265, 0.002), "recall": (0.5309, 0.003)},
    "ADM-G 128": {"frechet": (2.97329, 0.005), "spatial_frechet": (5.09456, 0.005), "inception_score": (141.4767, 0.3),
                  "precision": (0.78138, 0.002), "recall": (0.5929, 0.003)},
}


@dataclass(frozen=True)
class Finding:
    """What one planted fault does to one score."""
    fault: str
    score: str
    before: float
    after: float
    noise: float    # standard error of the change
    expected: str   # "up", "down", "same", or "any" where theory does not say

    @property
    def direction(self) -> str:
        """"up" or "down" where the change is more than twice the noise, else "same"."""
        change = self.after - self.before
        return "same" if abs(change) <= 2 * self.noise else "up" if change > 0 else "down"

    @property
    def verdict(self) -> str:
        """"as expected", "within noise" (four times it), or "wrong": find the reason before trusting a score."""
        if self.expected in ("any", self.direction):
            return "as expected"
        return "within noise" if abs(self.after - self.before) <= 4 * self.noise else "wrong"


class Anchor(NamedTuple):
    """One published score of a public file, measured again."""
    score: str
    measured: float
    published: float
    tolerance: float
    passed: bool


def diagnose(extractor: FeatureExtractor, images: Tensor, labels=None, healthy=None,
             suspects: Mapping[str, object] | None = None, seed: int = 0, rehearse: bool = False) -> list[Finding]:
    """Measure each fault on real images uint8 (N, 3, H, W): one half plays the generated set, the other the reference.

    With labels (N,) it measures by class too, if two have images enough. `suspects` are sets of generated images by the
    name of their fault (weights that are not the EMA, another schedule, another decoder scale), `healthy` is the set
    without it; each as `open_images` takes them, and as many images in each, since a distance depends on their number.
    ValueError for too few images, unless the call is to `rehearse` it: what it finds then means nothing.
    """
    dim = extractor(images[:1]).pool.shape[1]
    if len(images) < 2 * dim and not rehearse:
        raise ValueError(f"{len(images)} images: with less than {2 * dim}, twice the dimension of {extractor.id} "
                         "features, bias can hide a fault or even turn its sign")
    if labels is not None:
        labels = check_labels(labels, len(images))
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=generator)
    fake, real = images[order[::2]], images[order[1::2]]
    own, other = extractor(fake), extractor(real)
    reference = _statistics(other.pool)
    floor = frechet_distance(_statistics(own.pool), reference)
    itself = frechet_distance(reference, reference)
    findings = [Finding("same images on both sides", "Frechet distance", 0.0, itself, 1e-6, "same"),
                Finding("two halves of the real images", "Frechet distance", 0.0, floor, 1e-6, "up")]

    def compare(fault: str, expected: str, healthy: Tensor, faulty: Tensor, against: FeatureStatistics = reference,
                score: str = "Frechet distance", paired: bool = True) -> None:
        before, after = (frechet_distance(_statistics(x), against) for x in (healthy, faulty))
        a, b = influence(healthy, against), influence(faulty, against)
        variance = (b - a).var() if paired else a.var() + b.var()  # the same images before and after: noise cancels
        findings.append(Finding(fault, score, before, after, (variance / len(a)).sqrt().item(), expected))

    mine = own.logits.argmax(1) if own.logits.shape[1] else None
    if labels is not None:
        mine, theirs = labels[order[::2]], labels[order[1::2]]
        shuffle = torch.randperm(len(mine), generator=generator)
        compare("labels permuted", "same", own.pool, own.pool[shuffle])
        if len(measurable_classes(mine, theirs)) >= 2:   # of one alone the difference has no error
            right, wrong = (class_frechet(own.pool, some, other.pool, theirs).distance
                            for some in (mine, mine[shuffle]))
            findings.append(Finding("labels permuted", "mean Frechet distance of a class", right.mean(), wrong.mean(),
                                    (wrong - right).std() / len(right) ** 0.5, "up"))
    if (channels := extractor.spatial_channels) > 1:
        channels_first = own.spatial.unflatten(1, (-1, channels)).transpose(1, 2).flatten(1)
        compare("spatial head flattened channels first", "up", own.spatial, channels_first, _statistics(other.spatial),
                "spatial Frechet distance")
    if any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in extractor.modules()):
        compare("batch norm in train mode", "any", own.pool, _in_train_mode(extractor, fake))
    if own.logits.shape[1]:
        chunk = -(-len(fake) // 10)  # ten chunks, as in 50,000 images
        parts = [inception_score(part) for part in own.logits.split(chunk)]
        noise = float(np.std(parts) * (2 / len(parts)) ** 0.5)  # of the difference of two ways to cut
        by_class = own.logits[mine.argsort(stable=True)]
        for mode, expected in (("adm", "down"), ("strict", "same")):
            before, after = (inception_score(logits, mode, chunk) for logits in (own.logits, by_class))
            findings.append(Finding(f"sorted by class, mode {mode}", "Inception Score", before, after, noise, expected))
    jitter = torch.rand(fake.shape, generator=generator) - 0.5   # what rounding took away from a decoder's output
    for fault, expected, changed in (
            ("truncated instead of rounded", "any", (fake + jitter).floor().clamp(0, 255).byte()),
            ("halved and doubled in size", "up", _halved_and_doubled(fake)),
            ("JPEG of quality 75", "up", _jpeg(fake, 75))):
        compare(fault, expected, own.pool, extractor(changed).pool)
    if suspects:
        if healthy is None:
            raise ValueError("suspects are compared with images that have no fault: pass healthy")
        good = _pool_of(extractor, healthy, len(real))
        for fault, source in suspects.items():
            pool = _pool_of(extractor, source, len(good))
            if len(pool) != len(good):
                raise ValueError(f"{fault}: {len(pool)} images, healthy has {len(good)}; draw as many")
            compare(fault, "any", good, pool, paired=False)
    return findings


def check_anchors(scores: Scores, anchor: str = "ADM-G+U 256") -> list[Anchor]:
    """Compare the scores of a public ADM sample file, in mode "adm" and Inception features, with what was published."""
    if anchor not in ANCHORS:
        raise ValueError(f"no anchor {anchor!r}: expected one of {', '.join(ANCHORS)}")
    if scores.protocol.mode != "adm" or scores.protocol.features != "Inception":
        raise ValueError(f"published scores are in mode adm and Inception features, these in mode "
                         f"{scores.protocol.mode} and {scores.protocol.features} features")
    rows = []
    for name, (published, tolerance) in ANCHORS[anchor].items():
        measured = getattr(scores, name)
        if measured is None:
            raise ValueError(f"{name} was not measured: the reference file lacks what it needs (mu_s, sigma_s, arr_0)")
        rows.append(Anchor(name, measured, published, tolerance, abs(measured - published) <= tolerance))
    return rows


def _statistics(features: Tensor) -> FeatureStatistics:
    return FeatureStatistics(features.shape[1]).update(features)


def _in_train_mode(extractor: FeatureExtractor, images: Tensor) -> Tensor:
    """Pool features with statistics of each batch, on a copy: train mode also changes the running averages."""
    extractor = copy.deepcopy(extractor).train()
    device = next(extractor.parameters()).device
    with torch.no_grad(), full_float32():
        return torch.cat([extractor.heads(batch.to(device)).pool.float().cpu()
                          for batch in images.split(extractor.batch_size)])


def _halved_and_doubled(images: Tensor) -> Tensor:
    small = F.interpolate(images.float(), scale_factor=0.5, mode="bilinear")  # no antialias
    return F.interpolate(small, images.shape[-2:], mode="bilinear").round().clamp(0, 255).byte()


def _jpeg(images: Tensor, quality: int) -> Tensor:
    decoded = []
    for image in images.movedim(1, -1).numpy():  # (H, W, 3)
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=quality)
        decoded.append(np.asarray(Image.open(file)))
    return torch.from_numpy(np.stack(decoded)).movedim(-1, 1)


def _pool_of(extractor: FeatureExtractor, source, count: int) -> Tensor:
    """Pool features of any source; `count` is how many a function draws."""
    images = open_images(source, count if callable(source) else None)
    return torch.cat([extractor(images.read(start, min(start + 256, images.count))).pool
                      for start in range(0, images.count, 256)])
