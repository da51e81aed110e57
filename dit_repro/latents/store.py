"""Latent store: the moments of every image, plain and flipped, in memory-mapped shards with a manifest.

    manifest.json     what the store holds, from what and by what; written last, "complete": true
    labels.npy        (N,) int64
    shard-00000.npy   (n, 2, 2C, h, w): plain then flipped; mean then log-variance, before scaling
    shard-00000.json  the record of a finished shard, which resuming goes by
"""
import json
import math
import mmap
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dit_repro.files import sha256
from dit_repro.latents.autoencoder import Autoencoder

FORMAT, FORMAT_VERSION = "dit-repro latent store", 1
_CAN_ADVISE = hasattr(mmap, "MADV_WILLNEED")   # not on Windows


class LatentStore:
    """Moments and labels of encoded images, read from disk in any order. Made by `encode_to_store`.

    labels: (N,) int64; class_names; num_classes; latent_shape: (C, h, w); scale_factor; manifest: the whole of it.
    """

    def __init__(self, path: Path, manifest: dict):
        self.path = path
        self.manifest = manifest
        self.class_names = tuple(manifest["class_names"])
        self.num_classes = len(self.class_names)
        self.latent_shape = tuple(manifest["latent_shape"])
        self.scale_factor = manifest["scale_factor"]
        try:
            self.labels = np.load(path / "labels.npy")
        except (OSError, ValueError) as error:
            raise ValueError(f"latent store {path}: labels.npy is missing or cut short ({error}). Delete manifest.json "
                             f"and encode again: whole shards are kept.") from error
        rows = [shard["rows"] for shard in manifest["shards"]]
        self._ends = np.cumsum(rows)  # a shard may be short of skipped images
        self._starts = self._ends - rows
        self._shards, first_bytes = [], []  # mapped files, and where in each the rows (n, 2, 2C, h, w) begin
        self._moments_shape = (2 * self.latent_shape[0], *self.latent_shape[1:])  # (2C, h, w)
        moments_shape = (2, *self._moments_shape)
        for shard, n in zip(manifest["shards"], rows):
            try:
                array = np.load(path / shard["file"], mmap_mode="r")
            except (OSError, ValueError) as error:
                raise ValueError(f"latent store {path}: {shard['file']} is missing or cut short ({error}). Delete it "
                                 f"and manifest.json, and encode again: whole shards are kept.") from error
            if array.shape != (n, *moments_shape) or array.dtype != manifest["dtype"]:
                raise ValueError(f"latent store {path}: {shard['file']} holds {array.shape} {array.dtype}, "
                                 f"the manifest says {(n, *moments_shape)} {manifest['dtype']}")
            self._shards.append((array.base, memoryview(array.base)))
            first_bytes.append(array.offset % mmap.ALLOCATIONGRANULARITY)
            if _CAN_ADVISE:
                array.base.madvise(mmap.MADV_RANDOM)   # or each row brings along what the disk's read-ahead is set to
        self._first_bytes = np.array(first_bytes, np.int64)
        if not len(self.labels) == sum(rows) == manifest["count"]:
            raise ValueError(f"latent store {path}: {len(self.labels)} labels and {sum(rows)} moments, "
                             f"the manifest says {manifest['count']}")
        if len(self.labels) and not 0 <= self.labels.min() <= self.labels.max() < self.num_classes:
            raise ValueError(f"latent store {path}: labels from {self.labels.min()} to {self.labels.max()}, its "
                             f"{self.num_classes} classes are 0 to {self.num_classes - 1}. labels.npy has changed "
                             "since encoding: delete it and manifest.json, and encode again: whole shards are kept.")

    @classmethod
    def open(cls, path: str | Path, autoencoder: Autoencoder | None = None,
             resolution: int | None = None) -> "LatentStore":
        """Open a complete store; if given, the autoencoder and the image resolution must be those it was made with."""
        path = Path(path)
        manifest = read_manifest(path)
        asked = {} if resolution is None else {"resolution": resolution}
        if autoencoder is not None:
            asked |= describe(autoencoder)
        refuse_mismatch(path, manifest, asked)
        if not manifest["complete"]:
            done = len(list(path.glob("shard-*.json")))
            total = -(-manifest["source"]["count"] // manifest["shard_size"])
            raise ValueError(f"latent store {path} is not complete: {done} of {total} shards are encoded. "
                             f"Run the same encode again to finish it; it goes on where it stopped.")
        return cls(path, manifest)

    def __len__(self) -> int:
        return len(self.labels)

    def __reduce__(self):  # loader processes map the shards again; the pages themselves must not be pickled
        return LatentStore, (self.path, self.manifest)

    def moments(self, indices, flipped) -> Tensor:
        """Moments (N, 2C, h, w) float32 of the images at `indices`, of the mirrored image where `flipped` (N,) bool."""
        indices = np.asarray(indices)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"indices from {indices.min()} to {indices.max()}, the store holds {len(self)} images")
        flipped = np.broadcast_to(np.asarray(flipped, dtype=bool), indices.shape)
        shard = np.searchsorted(self._ends, indices, side="right")
        row = indices - self._starts[shard]
        dtype = np.dtype(self.manifest["dtype"])
        size = dtype.itemsize * math.prod(self._moments_shape)
        start = self._first_bytes[shard] + (2 * row + flipped) * size
        shards, starts = [self._shards[s] for s in shard.tolist()], start.tolist()
        if _CAN_ADVISE:   # all rows are asked of the disk before one is waited for
            within_page = start % mmap.PAGESIZE
            for (file, _), i, length in zip(shards, (start - within_page).tolist(), (size + within_page).tolist()):
                file.madvise(mmap.MADV_WILLNEED, i, length)
        # Slices of bytes joined by one copy: a numpy index a row costs three times as much, grouping by shard a time
        # that grows with the shards. torch converts a half faster than numpy.
        rows = bytearray().join([view[i:i + size] for (_, view), i in zip(shards, starts)])
        return torch.from_numpy(np.frombuffer(rows, dtype).reshape(-1, *self._moments_shape)).float()

    def latents(self, indices, flipped, noise: Tensor) -> Tensor:
        """Scaled latents (N, C, h, w) drawn from the posterior: (mean + exp(logvar / 2) * noise) * scale_factor."""
        mean, logvar = self.moments(indices, flipped).chunk(2, 1)
        if noise.shape != mean.shape:  # a broadcast noise would be shared by all images
            raise ValueError(f"noise of shape {tuple(noise.shape)}, expected {tuple(mean.shape)}")
        latents = (mean + (logvar / 2).exp() * noise) * self.scale_factor
        if not (finite := latents.flatten(1).isfinite().all(1)).all():
            first = int(np.asarray(indices)[~finite][0])
            raise ValueError(f"latent store {self.path}: moments of image {first} are not finite; "
                             "`dit-repro latents verify` names files that changed since encoding")
        return latents

    def verify(self) -> None:
        """Read every file and compare its checksum with the manifest; ValueError names those that differ."""
        files = [*self.manifest["shards"], {"file": "labels.npy", "sha256": self.manifest["labels_sha256"]}]
        wrong = [entry["file"] for entry in files if sha256(self.path / entry["file"]) != entry["sha256"]]
        if wrong:
            raise ValueError(f"latent store {self.path}: {', '.join(wrong)} changed since encoding. Delete the wrong "
                             f"files and manifest.json, and encode again: whole shards are kept.")


def describe(autoencoder: Autoencoder) -> dict:
    """What a manifest says about its autoencoder."""
    return {"autoencoder": {"id": autoencoder.id, "sha256": autoencoder.sha256},
            "scale_factor": autoencoder.scale_factor}


def read_manifest(path: Path) -> dict:
    """The manifest of a complete or unfinished store of this format version."""
    if not (path / "manifest.json").is_file():
        raise FileNotFoundError(f"no latent store at {path} (no manifest.json there): make one with `dit-repro encode`")
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path / 'manifest.json'} is not JSON ({error}). Delete it and encode again.") from error
    found = (manifest.get("format"), manifest.get("format_version")) if isinstance(manifest, dict) else None
    if found != (FORMAT, FORMAT_VERSION):
        raise ValueError(f"{path / 'manifest.json'}: format and version are {found}, this code reads "
                         f"{(FORMAT, FORMAT_VERSION)}. Encode again into a new folder.")
    return manifest


def refuse_mismatch(path: Path, manifest: dict, asked: dict) -> None:
    """Raise ValueError naming both values at the first entry of `asked` that the manifest contradicts."""
    for key, value in asked.items():
        held = manifest[key]
        # The checksum alone decides: the same weights or images may go by another name.
        same = held["sha256"] == value["sha256"] if isinstance(value, dict) else held == value
        if not same:
            raise ValueError(f"latent store {path}: made with {key} {_short(held)}, asked for {_short(value)}. "
                             f"Ask for what it was made with, or encode into another folder.")


def _short(value) -> str:
    if not isinstance(value, dict):
        return repr(value)
    return ", ".join(f"{key} {item[:8]}" if key == "sha256" else f"{item}" for key, item in value.items())
