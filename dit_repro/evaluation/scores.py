"""From images to scores: Frechet distances, Inception Score, precision, recall, kernel distance, and their protocol."""
import dataclasses
import json
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from dit_repro.evaluation.bias import standard_error
from dit_repro.evaluation.extract import FeatureSet, extract
from dit_repro.evaluation.features import FeatureExtractor, Features
from dit_repro.evaluation.fidelity import inception_score, kernel_distance, precision_recall
from dit_repro.evaluation.frechet import frechet_distance
from dit_repro.evaluation.image_sets import npz_names, open_images
from dit_repro.evaluation.protocol import Protocol
from dit_repro.evaluation.statistics import FeatureStatistics
from dit_repro.files import sha256

REFERENCE_ROWS = 10_000  # reference images behind precision, recall and kernel distance, as in ADM's reference files
NEAREST = 3              # k of precision and recall


@dataclass(frozen=True)
class Scores:
    """What `evaluate` measured. None: the reference or the extractor does not have what that score needs."""
    protocol: Protocol
    frechet: float                       # on the pool head; protocol.frechet_name() says what to call it
    interval: tuple[float, float]        # 95%, of frechet, over drawing the generated images again
    spatial_frechet: float | None
    inception_score: float | None
    precision: float | None
    recall: float | None
    kernel_distance: float | None
    kernel_distance_std: float | None    # over subsets

    def report(self) -> str:
        """A line a score, the first with its name, interval, counts and protocol."""
        lines = {self.protocol.frechet_name("spatial"): self.spatial_frechet, "Inception Score": self.inception_score,
                 "precision": self.precision, "recall": self.recall, "kernel distance": self.kernel_distance}
        said = [f"{name} = {value:.4g}" for name, value in lines.items() if value is not None]
        return "\n".join([self.protocol.report(self.frechet, self.interval), *said, f"mode {self.protocol.mode}"])

    def to_json(self) -> dict:
        """Scores and protocol as plain values, with the fingerprint."""
        return {**asdict(self), "fingerprint": self.protocol.fingerprint}


@dataclass(frozen=True)
class _Reference:
    statistics: FeatureStatistics
    spatial: FeatureStatistics | None
    pool: Tensor | None  # (M, D)
    sha256: str


def evaluate(images, reference, extractor: FeatureExtractor, mode: str = "adm", count: int | None = None,
             cache: str | Path | None = None, reference_count: int | None = None, shard_size: int = 2_000,
             **generator) -> Scores:
    """Score images against a reference, both as `open_images` takes them: sampler, .npz, folder or tensor.

    The reference may also be an .npz with `mu` and `sigma` (and `mu_s`, `sigma_s`, `arr_0`: ADM's reference batches);
    `reference_count` is the number of images behind such statistics, where the file does not say. `mode` "adm" gives
    the published numbers, "strict" order-proof and float32 ones. `cache` is a folder that makes a killed call go on,
    and a second one with the same images free. `generator` fields are those of `Protocol`: rounding, label_policy,
    seeds, guidance, sampler, num_steps, checkpoint_sha256, autoencoder_sha256. Under torch.distributed every rank
    returns the same scores. Raises ValueError on input that cannot be scored, before any image goes through the network
    where that can be known.
    """
    if mode not in ("adm", "strict"):
        raise ValueError(f"mode {mode!r}: expected 'adm' or 'strict'")
    protocol = Protocol.of(extractor, num_generated=0, num_reference=0, reference_sha256="", mode=mode, **generator)
    identity = json.dumps(generator, sort_keys=True) if protocol.checkpoint_sha256 else ""
    images = open_images(images, count)
    _enough(images.count, images.name)
    trial = extractor(images.read(0, 1))  # images that do not fit fail here, not after the reference
    against = _open_reference(reference, extractor, trial, cache, reference_count, shard_size)
    generated = extract(images, extractor, cache=cache, identity=identity, shard_size=shard_size)
    protocol = dataclasses.replace(protocol, num_generated=generated.count, num_reference=against.statistics.count,
                                   reference_sha256=against.sha256)
    if not dist.is_initialized():
        return _score(protocol, generated, against)
    scores = [_score(protocol, generated, against) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(scores, src=0)
    return scores[0]


def _enough(count: int, name: str) -> None:
    if count <= NEAREST:
        raise ValueError(f"{name}: {count} image(s). A score needs more than {NEAREST}, and better thousands")


def _open_reference(source, extractor: FeatureExtractor, trial: Features, cache, count: int | None,
                    shard_size: int) -> _Reference:
    statistics = None
    if isinstance(source, (str, Path)) and Path(source).suffix == ".npz" and Path(source).is_file():
        names = npz_names(source)
        if "mu" in names:
            statistics = FeatureStatistics.load(source, count)
            spatial = FeatureStatistics.load(source, count, "_s") if "mu_s" in names else None
            for found, head in ((statistics, trial.pool), (spatial, trial.spatial)):
                if found and found.dim != head.shape[1]:
                    raise ValueError(f"{source}: statistics of {found.dim} dimensions, {extractor.id} features have "
                                     f"{head.shape[1]}: pass the extractor that they were made with")
            if "arr_0" not in names:
                return _Reference(statistics, spatial, None, sha256(source))
    images = open_images(source)
    _enough(images.count, f"reference {images.name}")
    features = extract(images, extractor, cache=cache, keep=REFERENCE_ROWS, shard_size=shard_size)
    if statistics:
        return _Reference(statistics, spatial, features.pool, sha256(source))
    return _Reference(features.statistics, features.spatial, features.pool, features.sha256)


def _score(protocol: Protocol, generated: FeatureSet, against: _Reference) -> Scores:
    distance = frechet_distance(generated.statistics, against.statistics)
    half = 1.96 * standard_error(generated.pool, against.statistics)
    inception = precision = recall = kernel = kernel_std = None
    if generated.logits.shape[1]:
        inception, shuffled = (inception_score(generated.logits, mode) for mode in (protocol.mode, "strict"))
        if abs(inception / shuffled - 1) > 0.05:
            warnings.warn(f"Inception Score {inception:.2f} by chunks in file order, {shuffled:.2f} shuffled: these "
                          "images seem to be sorted by class. Shuffle them, or score in mode 'strict'", stacklevel=3)
    if against.pool is not None:
        precision, recall = precision_recall(generated.pool, against.pool, protocol.mode, NEAREST)
        kernel, kernel_std = kernel_distance(generated.pool, against.pool,
                                             subset_size=min(1_000, len(generated.pool), len(against.pool)))
    return Scores(protocol, distance, (max(distance - half, 0.0), distance + half),
                  frechet_distance(generated.spatial, against.spatial) if against.spatial else None,
                  inception, precision, recall, kernel, kernel_std)
