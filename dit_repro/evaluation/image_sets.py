"""Images to score, wherever they are: a tensor, an .npz, a folder, or a sampler that has not drawn them yet."""
import hashlib
import io
import json
import struct
import zipfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dit_repro.files import atomic_write

SUFFIXES = {".jpg", ".jpeg", ".png", ".gif", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}


class ImageSet:
    """`count` images by position: `read(start, stop)` gives uint8 (stop - start, 3, H, W).

    `identity()` is equal for equal images, without reading them all; "" where it cannot be known.
    `in_order` says that reading goes forward once, so that nothing can be dealt out or read again.
    """

    def __init__(self, name: str, count: int, read: Callable[[int, int], Tensor], identity: Callable[[], str],
                 in_order: bool = False):
        self.name, self.count, self._read, self.identity, self.in_order = name, count, read, identity, in_order

    def read(self, start: int, stop: int) -> Tensor:
        images = self._read(start, stop)
        if (not isinstance(images, Tensor) or images.dtype != torch.uint8 or images.ndim != 4
                or images.shape[:2] != (stop - start, 3)):
            found = f"{images.dtype} {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
            raise ValueError(f"{self.name}, images {start} to {stop - 1}: expected a uint8 tensor of shape "
                             f"({stop - start}, 3, H, W), found {found}")
        return images


def open_images(source, count: int | None = None) -> ImageSet:
    """The images in `source`; `count` takes the first of them, and is needed for the two kinds of sampler.

    A tensor uint8 (N, 3, H, W); the path of an .npz whose `arr_0` is uint8 (N, H, W, 3), as the ADM evaluator reads
    it: memory-mapped, or read as a stream if compressed; the path of a folder of equally large images, read in sorted
    order with its subfolders; an ImageSource; a function from a range of positions to images; an iterator of batches.
    A function can be called again for any position, which is what ranks and resuming need. Raises ValueError or
    FileNotFoundError.
    """
    if isinstance(source, ImageSet):
        images = source
    elif isinstance(source, (str, Path)):
        path = Path(source)
        if path.is_dir():
            images = _folder(path)
        elif path.suffix == ".npz" and path.is_file():
            images = _npz(path)
        elif path.exists():
            raise ValueError(f"{path}: expected an .npz of images or a folder of images")
        else:
            raise FileNotFoundError(f"no images at {path}: expected an .npz or a folder")
    elif isinstance(source, Tensor):
        images = ImageSet("image tensor", len(source), lambda start, stop: source[start:stop],
                          lambda: hashlib.sha256(source.cpu().contiguous().numpy()).hexdigest())
    elif hasattr(source, "images") and hasattr(source, "identity"):
        images = ImageSet(str(source.identity["kind"]), len(source),
                          lambda start, stop: source.images(range(start, stop)),
                          lambda: json.dumps(source.identity, sort_keys=True))
    else:
        if not (callable(source) or isinstance(source, Iterable)):
            raise ValueError(f"images from a {type(source).__name__}: expected a uint8 tensor, a path, a function of "
                             "positions, or an iterator of uint8 batches")
        if count is None:
            raise ValueError("count is missing: a sampler does not say how many images to draw")
        if callable(source):
            images = ImageSet("sampler", count, lambda start, stop: source(range(start, stop)), lambda: "")
        else:
            images = ImageSet("sampler", count, _in_order(source, count), lambda: "", in_order=True)
    if count is not None:
        if not 1 <= count <= images.count:
            raise ValueError(f"count {count}: {images.name} holds {images.count} images")
        images.count = count
    return images


def _in_order(batches: Iterable[Tensor], count: int) -> Callable[[int, int], Tensor]:
    batches, waiting, first = iter(batches), torch.empty(0), 0

    def read(start: int, stop: int) -> Tensor:
        nonlocal waiting, first
        if start < first:
            raise ValueError(f"an iterator cannot go back to image {start}: pass a function of positions")
        waiting, first = waiting[start - first:], start  # what lies behind is dropped only now: the first can be tried
        while len(waiting) < stop - start:
            batch = next(batches, None)
            if batch is None:
                raise ValueError(f"the sampler ended after {start + len(waiting)} images, count is {count}")
            waiting = torch.cat([waiting, batch]) if len(waiting) else batch
        return waiting[:stop - start]

    return read


def _folder(root: Path) -> ImageSet:
    paths = sorted(path for path in root.rglob("*")
                   if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts))
    if not paths:
        raise ValueError(f"no image in {root}: the folder is empty")
    for path in paths:
        if path.suffix.lower() not in SUFFIXES:
            raise ValueError(f"{path} is not an image ({', '.join(sorted(SUFFIXES))}): move it out of the folder")
    shape = _decode(paths[0]).shape

    def read(start: int, stop: int) -> Tensor:
        with ThreadPoolExecutor() as threads:
            arrays = list(threads.map(_decode, paths[start:stop]))
        for path, array in zip(paths[start:stop], arrays):
            if array.shape != shape:
                raise ValueError(f"mixed sizes in {root}: {path.name} has {array.shape[1]}x{array.shape[0]} pixels, "
                                 f"{paths[0].name} {shape[1]}x{shape[0]}. Resize them all in one known way first")
        return torch.from_numpy(np.stack(arrays)).movedim(-1, 1)

    def identity() -> str:
        described = "".join(f"{path.relative_to(root)}\0{path.stat().st_size}\n" for path in paths)
        return hashlib.sha256(described.encode(errors="surrogateescape")).hexdigest()

    return ImageSet(str(root), len(paths), read, identity)


def _decode(path: Path) -> np.ndarray:
    """(H, W, 3) uint8."""
    data = path.read_bytes()  # a failing disk is not a damaged image
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.mode[0] in "IF":
                raise ValueError(f"mode {image.mode} has more than 8 bits a channel; convert it first")
            return np.asarray(image.convert("RGB"))
    except Exception as error:  # decoders raise nearly anything on bad bytes
        raise ValueError(f"{path}: not a readable image ({type(error).__name__}: {error})") from error


def npz_names(path: Path) -> list[str]:
    """The arrays in an .npz; ValueError if it is none."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path}: not an .npz ({error}). Fetch it again") from error


def _npz(path: Path) -> ImageSet:
    if "arr_0" not in (names := npz_names(path)):
        raise ValueError(f"{path}: no arr_0; it holds {', '.join(names) or 'nothing'}")
    archive = zipfile.ZipFile(path)
    member = archive.getinfo("arr_0.npy")
    stream = archive.open(member)
    version = np.lib.format.read_magic(stream)
    header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
    shape, fortran_order, dtype = header(stream)
    if dtype != np.uint8 or len(shape) != 4 or shape[-1] != 3 or fortran_order:
        raise ValueError(f"{path}: arr_0 is {dtype} {shape}, expected uint8 (N, H, W, 3) with values 0 to 255")
    begin, row = stream.tell(), int(np.prod(shape[1:]))
    if member.compress_type == zipfile.ZIP_STORED:
        with open(path, "rb") as file:  # the local header repeats the name, with extra fields of its own
            file.seek(member.header_offset + 26)
            begin += member.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
        def rows(start: int, stop: int) -> np.ndarray:  # mapped anew each time, so that pages read do not stay resident
            return np.memmap(path, np.uint8, "r", begin, shape)[start:stop].copy()
    else:
        def rows(start: int, stop: int) -> np.ndarray:
            stream.seek(begin + start * row)  # forward it inflates what it skips, backward it begins again
            return np.frombuffer(bytearray(stream.read((stop - start) * row)), np.uint8).reshape(-1, *shape[1:])

    return ImageSet(str(path), shape[0], lambda start, stop: torch.from_numpy(rows(start, stop)).movedim(-1, 1),
                    lambda: f"{member.CRC:08x} {shape}")


def write_npz(path: str | Path, source, count: int | None = None, labels=None, batch_size: int = 256) -> None:
    """Write images of any source of `open_images` as the ADM evaluator reads them: `arr_0` uint8 (N, H, W, 3).

    One batch is in memory at a time. `labels` (N,) become `arr_1`. The file is there whole or not at all.
    """
    images = open_images(source, count)
    if labels is not None and len(labels) != images.count:
        raise ValueError(f"{len(labels)} labels for {images.count} images")
    shape = None
    with atomic_write(path, "wb") as file, zipfile.ZipFile(file, "w") as archive:
        with archive.open("arr_0.npy", "w", force_zip64=True) as member:
            for start in range(0, images.count, batch_size):
                batch = images.read(start, min(start + batch_size, images.count)).movedim(1, -1)  # (n, H, W, 3)
                if shape is None:
                    shape = batch.shape[1:]
                    np.lib.format.write_array_header_1_0(
                        member, {"descr": "|u1", "fortran_order": False, "shape": (images.count, *shape)})
                if batch.shape[1:] != shape:
                    raise ValueError(f"mixed sizes in {images.name}: {tuple(batch.shape[1:])} at image {start}, "
                                     f"{tuple(shape)} before")
                member.write(batch.cpu().contiguous().numpy())
        if labels is not None:
            with archive.open("arr_1.npy", "w") as member:
                np.lib.format.write_array(member, np.asarray(labels, np.int64))
