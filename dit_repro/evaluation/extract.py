"""One pass over images: features to disk shard by shard, statistics as it goes. Resumable, on one process or many."""
import hashlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dit_repro.evaluation.features import FeatureExtractor
from dit_repro.evaluation.image_sets import ImageSet, open_images
from dit_repro.evaluation.statistics import FeatureStatistics, check_features
from dit_repro.files import atomic_write, write_json
from dit_repro.progress import progress


@dataclass(frozen=True)
class FeatureSet:
    """Features of a set of images."""
    pool: Tensor                   # (n, D) float32, memory-mapped: of all images, or of `keep` of them
    logits: Tensor                 # (n, K) float32, memory-mapped: of the same images
    statistics: FeatureStatistics  # of pool, all N images
    spatial: FeatureStatistics     # of the spatial head, all N images
    sha256: str                    # of the pixels in their order, the same in any container

    @property
    def count(self) -> int:
        return self.statistics.count


def extract(source, extractor: FeatureExtractor, count: int | None = None, cache: str | Path | None = None,
            identity: str = "", keep: int | None = None, shard_size: int = 2_000) -> FeatureSet:
    """Features of the images in `source`, as `open_images` takes them.

    `cache` is a folder: called again with the same images and extractor it returns at once, and after a kill it goes
    on behind the last whole shard. `identity` names what a sampler draws there. `keep` limits the rows kept to that
    many, evenly spaced. Where torch.distributed is set up, shards are dealt to the ranks in turn, and all ranks must
    see `cache`; shards are joined in their own order, so the result is the same on any number of ranks. Memory is one
    batch of images, one shard of features and a few (D, D) matrices, whatever the count.
    """
    images = open_images(source, count)
    if cache is None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError("several ranks share their features through a folder: pass cache")
        with tempfile.TemporaryDirectory() as folder:
            return _extract(images, extractor, Path(folder), keep, shard_size)  # mapped files outlive their names
    identity = images.identity() or identity
    if not identity or images.in_order:
        raise ValueError("a cache needs to know what a sampler draws and to ask for any image again: pass a function "
                         "of positions, and checkpoint_sha256" if images.in_order else
                         "a cache needs to know what this sampler draws: pass checkpoint_sha256")
    made_from = {"images": images.name, "identity": identity, "count": images.count, "features": extractor.id,
                 "features_sha256": extractor.sha256, "keep": keep, "shard_size": shard_size}
    key = hashlib.sha256(json.dumps({**made_from, "images": ""}).encode()).hexdigest()[:16]
    folder = Path(cache) / key
    write_json(folder / "made_from.json", made_from)
    return _extract(images, extractor, folder, keep, shard_size)


def _extract(images: ImageSet, extractor: FeatureExtractor, folder: Path, keep: int | None,
             shard_size: int) -> FeatureSet:
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if not (folder / "done.json").exists():
        kept = np.unique(np.linspace(0, images.count - 1, min(keep or images.count, images.count)).round().astype(int))
        starts = range(0, images.count, shard_size)
        shards = [(folder / f"shard-{number:05d}", range(start, min(start + shard_size, images.count)))
                  for number, start in enumerate(starts)]
        mine = [(stem, shard) for stem, shard in shards[rank::world_size]]
        todo = [(stem, shard) for stem, shard in mine if not stem.with_suffix(".rows.npz").exists()]
        total = sum(len(shard) for _, shard in mine)
        with progress(total=total, initial=total - sum(len(shard) for _, shard in todo), unit="image",
                      desc=f"{extractor.id} features") as bar:
            for stem, shard in todo:
                _write_shard(images, extractor, stem, shard, kept, bar)
        if world_size > 1:
            dist.barrier()
        if rank == 0:
            _join(folder, [stem for stem, _ in shards], len(kept), images.name)
        if world_size > 1:
            dist.barrier()
    pool, logits = (torch.from_numpy(np.load(folder / f"{head}.npy", mmap_mode="c")) for head in ("pool", "logits"))
    statistics, spatial = (FeatureStatistics.load(folder / f"{head}.npz") for head in ("pool", "spatial"))
    return FeatureSet(pool, logits, statistics, spatial, json.loads((folder / "done.json").read_text())["sha256"])


def _write_shard(images: ImageSet, extractor: FeatureExtractor, stem: Path, shard: range, kept, bar) -> None:
    """Statistics first, then the kept rows and a hash of each image: a shard with rows is whole."""
    heads, hashes = [], []
    for start in range(shard.start, shard.stop, extractor.batch_size):
        batch = images.read(start, min(start + extractor.batch_size, shard.stop))
        hashes += [hashlib.sha256(image.cpu().contiguous().numpy()).digest() for image in batch]
        heads.append(extractor(batch))
        bar.update(len(batch))
    pool, spatial, logits = (torch.cat(head) for head in zip(*heads))
    for name, head in (("pool", pool), ("spatial", spatial)):
        check_features(head, f"{images.name}, images from {shard.start}, {name} features")
        FeatureStatistics(head.shape[1]).update(head).save(stem.with_suffix(f".{name}.npz"))
    rows = kept[(kept >= shard.start) & (kept < shard.stop)] - shard.start
    with atomic_write(stem.with_suffix(".rows.npz"), "wb") as file:
        np.savez(file, pool=pool[rows].numpy(), logits=logits[rows].numpy(),
                 hashes=np.frombuffer(b"".join(hashes), np.uint8))


def _join(folder: Path, stems: list[Path], rows: int, name: str) -> None:
    """One file a head out of all shards, one shard in memory at a time."""
    digest = hashlib.sha256()
    for head in ("pool", "logits"):
        with atomic_write(folder / f"{head}.npy", "wb") as file:
            for i, stem in enumerate(stems):
                with np.load(stem.with_suffix(".rows.npz")) as shard:
                    if i == 0:
                        np.lib.format.write_array_header_1_0(
                            file, {"descr": "<f4", "fortran_order": False, "shape": (rows, shard[head].shape[1])})
                    file.write(shard[head].tobytes())
                    if head == "pool":
                        digest.update(shard["hashes"])
    for head in ("pool", "spatial"):
        statistics = None
        for stem in stems:
            part = FeatureStatistics.load(stem.with_suffix(f".{head}.npz"))
            statistics = statistics.merge(part) if statistics else part
        if head == "pool" and statistics.count > 1:
            spread, size = statistics.covariance.trace(), statistics.mean.square().sum()
            if spread <= 1e-10 * size:
                raise ValueError(f"{name}: all {statistics.count} images have the same features. Look at the images: "
                                 "are they all one color?")
        statistics.save(folder / f"{head}.npz")
    write_json(folder / "done.json", {"sha256": digest.hexdigest()})
    for stem in stems:
        for part in ("rows", "pool", "spatial"):
            stem.with_suffix(f".{part}.npz").unlink()
