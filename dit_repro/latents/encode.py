"""Encoding images into a latent store: resumable, on one process or on all ranks of torchrun."""
import json
import os
import time
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader

from dit_repro.files import atomic_write, sha256, write_json
from dit_repro.latents.autoencoder import Autoencoder
from dit_repro.latents.images import ImageSource
from dit_repro.latents.store import FORMAT, FORMAT_VERSION, LatentStore, describe, read_manifest, refuse_mismatch
from dit_repro.progress import progress


def encode_to_store(source: ImageSource, autoencoder: Autoencoder, path: str | Path, batch_size: int = 64,
                    shard_size: int = 8192, dtype: str = "float16", workers: int | None = None) -> LatentStore:
    """Encode every image, plain and flipped, and return the store; at once if it is there and made from the same.

    Killed and called again, it goes on after the last finished shard. Under torchrun, shards are dealt to the ranks
    in turn and every rank returns when the last shard is verified; `path` must be on a file system they all see.
    Memory: one shard (a row of 2 x 2C x h x w values for each of `shard_size` images) and the batches of `workers`
    loader processes, which by default are none for images in memory and otherwise one a core, at most 8.
    Raises ValueError if `path` holds a store made from anything else, or for a damaged image where the source says so.
    """
    path = Path(path)
    if dtype not in ("float16", "float32"):
        raise ValueError(f"dtype is {dtype!r}, expected 'float16' or 'float32'")
    if batch_size < 1 or shard_size < 1:
        raise ValueError(f"batch_size is {batch_size} and shard_size {shard_size}, expected at least 1")
    if source.resolution % autoencoder.downsampling:
        raise ValueError(f"resolution is {source.resolution}, autoencoder {autoencoder.id} needs a multiple of "
                         f"{autoencoder.downsampling}")
    asked = {**describe(autoencoder), "resolution": source.resolution, "dtype": dtype, "source": source.identity}
    size = source.resolution // autoencoder.downsampling
    plan = {"format": FORMAT, "format_version": FORMAT_VERSION, "complete": False, **asked,
            "flips": "plain and flipped, flipped in pixels before encoding",
            "latent_shape": [autoencoder.latent_channels, size, size], "shard_size": shard_size,
            "class_names": list(source.class_names)}
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    manifest = read_manifest(path) if (path / "manifest.json").exists() else None
    if manifest and (manifest["complete"] or any(path.glob("shard-*.json"))):   # else at most a first try that failed
        refuse_mismatch(path, manifest, asked)
        if manifest["complete"]:
            return LatentStore(path, manifest)
        refuse_mismatch(path, manifest, {"shard_size": shard_size})
    elif rank == 0:
        write_json(path / "manifest.json", plan)

    # A record counts only for the plan it was made by: the manifest may have been deleted and the shards not.
    made_by = [autoencoder.sha256, source.identity["sha256"], source.resolution, dtype, shard_size]
    shards = [range(start, min(start + shard_size, len(source))) for start in range(0, len(source), shard_size)]
    mine = {number: shards[number] for number in range(rank, len(shards), world_size)}
    todo = {number: shard for number, shard in mine.items() if _finished(path, number, made_by) is None}
    if workers is None:
        cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        workers = 0 if source.in_memory else min(8, max(1, cores))
    total = sum(map(len, mine.values()))
    with progress(total=total, initial=total - sum(map(len, todo.values())), unit="image",
                  desc="encode" if world_size == 1 else f"encode, rank {rank} of {world_size}") as bar:
        for number, moments, skipped in _encode_shards(source, autoencoder, todo, batch_size, dtype, workers, bar):
            _write_shard(path, number, moments, skipped, made_by)
    if rank == 0:
        _finish(path, plan, source, [_wait(lambda n=n: _finished(path, n, made_by)) for n in range(len(shards))])
    _wait(lambda: (path / "manifest.json").exists() and read_manifest(path)["complete"])
    return LatentStore.open(path, autoencoder, source.resolution)


def _encode_shards(source, autoencoder, shards: dict[int, range], batch_size, dtype, workers, bar):
    """Yield (number, moments (n, 2, 2C, h, w), skipped images) of each shard; batches never span two shards."""
    batches = [shard[i:i + batch_size] for shard in shards.values() for i in range(0, len(shard), batch_size)]
    # One loader over all shards: its workers decode ahead while the autoencoder works, and never run dry.
    loader = iter(DataLoader(_Batches(source), sampler=batches, batch_size=None, num_workers=workers,
                             collate_fn=_as_is))
    size = source.resolution // autoencoder.downsampling
    for number, shard in shards.items():
        moments = np.empty((len(shard), 2, 2 * autoencoder.latent_channels, size, size), dtype)
        rows, skipped = 0, []
        for _ in range(0, len(shard), batch_size):
            images, damaged = next(loader)
            if damaged and source.on_damaged == "raise":
                index, reason = damaged[0]
                raise ValueError(f"damaged image {source.root / source.file(index)} ({reason}). Leave such images out "
                                 f"with --on-damaged skip: finished shards are kept, and the manifest names each.")
            skipped += [{"index": index, "file": source.file(index), "reason": reason} for index, reason in damaged]
            if len(images):
                for flip, batch in enumerate((images, images.flip(-1))):
                    moments[rows:rows + len(batch), flip] = autoencoder.encode(batch).cpu().numpy()
            rows += len(images)
            bar.update(len(images) + len(damaged))
        yield number, moments[:rows], skipped


class _Batches:
    """What the loader's workers index with the indices of a batch."""

    def __init__(self, source: ImageSource):
        self._source = source

    def __getitem__(self, indices):
        return self._source.read(indices)


def _as_is(batch):
    return batch


def _write_shard(path: Path, number: int, moments: np.ndarray, skipped: list[dict], made_by: list) -> None:
    """Write a shard, then its record: a shard without a record is encoded again."""
    if not np.isfinite(moments).all():
        raise RuntimeError(f"shard {number}: some moments are not finite in {moments.dtype}. If the autoencoder's are "
                           f"finite, encode with dtype float32.")
    file = f"shard-{number:05d}.npy"
    with atomic_write(path / file, "wb") as out:
        np.save(out, moments)
    record = {"file": file, "rows": len(moments), "sha256": sha256(path / file), "skipped": skipped, "made_by": made_by}
    write_json(path / f"shard-{number:05d}.json", record)


def _finished(path: Path, number: int, made_by: list) -> dict | None:
    """The record of a shard that is there and was made from the same."""
    file = path / f"shard-{number:05d}.json"
    if not file.exists() or not file.with_suffix(".npy").exists():
        return None
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:   # damaged: what cannot be read vouches for nothing
        return None
    return record if record["made_by"] == made_by else None


def _finish(path: Path, plan: dict, source: ImageSource, records: list[dict]) -> None:
    """Write labels and the complete manifest, once every checksum on disk is right."""
    skipped = [image for record in records for image in record["skipped"]]
    labels = np.delete(source.labels, [image["index"] for image in skipped])
    if not len(labels):
        raise ValueError(f"not one of {len(source)} images could be read, the first for: {skipped[0]['reason']}")
    with atomic_write(path / "labels.npy", "wb") as out:
        np.save(out, labels)
    shards = [{key: record[key] for key in ("file", "rows", "sha256")} for record in records]
    manifest = {**plan, "complete": True, "count": len(labels), "labels_sha256": sha256(path / "labels.npy"),
                "skipped": skipped, "shards": shards}
    LatentStore(path, manifest).verify()
    write_json(path / "manifest.json", manifest)


def _wait(condition):
    """The first true value of `condition`, asked every half second: other ranks work at their own pace."""
    while not (value := condition()):
        time.sleep(0.5)
    return value
