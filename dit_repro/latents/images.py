"""Where images come from: the embedded Fashion-MNIST, the full IDX files, or a tree of class folders."""
import gzip
import hashlib
import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dit_repro.files import atomic_write

FASHION_MNIST_CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat",
                         "sandal", "shirt", "sneaker", "bag", "ankle boot")
EMBEDDED = Path(__file__).parent / "embedded"
IDX_STEMS = {"train": "train", "test": "t10k"}  # our name of a split, and the published files' name
IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".gif", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}
BORDER = 2  # pixels of zero padding on each side: 28x28 becomes 32x32, which halves evenly


class ImageSource:
    """Labelled square images, read on demand. Make one with `embedded`, `idx` or `folder`.

    labels: (N,) int64; class_names: the name of each label; resolution: pixels a side;
    identity: what a manifest records, equal for equal data wherever it lies;
    root: the folder of a `folder`;
    on_damaged: what `encode_to_store` does with an image that cannot be read, "raise" or "skip".
    """

    def __init__(self, labels, class_names, resolution, identity, *, pixels=None, root=None, names=None,
                 on_damaged="raise"):
        self.labels = np.asarray(labels, np.int64)
        self.class_names = tuple(class_names)
        self.resolution = resolution
        self.identity = {**identity, "count": len(self.labels), "resolution": resolution}
        self.on_damaged = on_damaged
        self._pixels = pixels  # (N, R, R) uint8 grey, or None
        self.root = root
        self._names = names  # (N,) bytes, relative paths; an array, so that loader workers share its pages

    @classmethod
    def embedded(cls, split: str = "train", limit_per_class: int | None = None) -> "ImageSource":
        """The Fashion-MNIST images in this package: 1,600 a class in "train", 400 held out in "test", at 32x32."""
        images, labels = _read_pair(EMBEDDED, split)
        if limit_per_class is not None:
            if limit_per_class < 1:
                raise ValueError(f"limit_per_class is {limit_per_class}, expected at least 1")
            keep = first_of_each_class(labels, limit_per_class)
            images, labels = images[keep], labels[keep]
        return cls._fashion_mnist(images, labels, "embedded Fashion-MNIST", split)

    @classmethod
    def idx(cls, folder: str | Path, split: str = "train") -> "ImageSource":
        """Fashion-MNIST from its published IDX files (60,000 train, 10,000 test), gzipped or not, at 32x32."""
        images, labels = _read_pair(Path(folder), split)
        return cls._fashion_mnist(images, labels, "Fashion-MNIST IDX files", split)

    @classmethod
    def _fashion_mnist(cls, images, labels, kind, split):
        pixels = np.pad(images, ((0, 0), (BORDER, BORDER), (BORDER, BORDER)))  # (N, 32, 32)
        digest = hashlib.sha256(labels.tobytes() + images.tobytes()).hexdigest()
        identity = {"kind": kind, "split": split, "sha256": digest}
        return cls(labels, FASHION_MNIST_CLASSES, pixels.shape[-1], identity, pixels=pixels)

    @classmethod
    def folder(cls, path: str | Path, resolution: int, on_damaged: str = "raise") -> "ImageSource":
        """A tree of class folders, `path/class name/image file`: the layout of ImageNet's train folder.

        Labels follow the sorted folder names. Images are cropped as in `center_crop`. The identity hashes names and
        sizes of the files, not their bytes. A zero-byte file raises here, other damage when the image is read.
        """
        root = Path(path)
        if on_damaged not in ("raise", "skip"):
            raise ValueError(f"on_damaged is {on_damaged!r}, expected 'raise' or 'skip'")
        if not isinstance(resolution, int) or resolution < 1:
            raise ValueError(f"resolution is {resolution!r}, expected a positive number of pixels")
        class_names, files = _scan(root)
        names = [f"{class_names[label]}/{name}" for label, name, _ in files]
        empty = [name for name, (_, _, size) in zip(names, files) if size == 0]
        if empty and on_damaged == "raise":
            raise ValueError(f"{len(empty)} zero-byte image(s) in {root}, the first is {root / empty[0]}. "
                             f"Fetch it again, or pass on_damaged='skip' to leave it out.")
        digest = hashlib.sha256()
        for name, (_, _, size) in zip(names, files):
            digest.update(f"{name}\0{size}\n".encode(errors="surrogateescape"))
        identity = {"kind": "class folders", "sha256": digest.hexdigest()}
        names = np.array([name.encode(errors="surrogateescape") for name in names])
        return cls([label for label, _, _ in files], class_names, resolution, identity,
                   root=root, names=names, on_damaged=on_damaged)

    def take(self, indices) -> "ImageSource":
        """The images at `indices` as a source of their own: a part, another order, or some of them repeated."""
        indices = np.asarray(indices, np.int64)
        digest = hashlib.sha256(self.identity["sha256"].encode() + indices.tobytes()).hexdigest()
        pixels, names = (None if values is None else values[indices] for values in (self._pixels, self._names))
        return ImageSource(self.labels[indices], self.class_names, self.resolution, {**self.identity, "sha256": digest},
                           pixels=pixels, root=self.root, names=names, on_damaged=self.on_damaged)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def in_memory(self) -> bool:
        """Whether reading costs nothing: no file to open, no image to decode."""
        return self._pixels is not None

    def file(self, index: int) -> str:
        """The file of an image of a `folder`, relative to `root`."""
        return self._names[index].decode(errors="surrogateescape")

    def images(self, indices) -> Tensor:
        """Images (N, 3, R, R) uint8 at `indices`. ValueError names the first that is damaged."""
        images, damaged = self.read(indices)
        if damaged:
            index, reason = damaged[0]
            raise ValueError(f"{self.root / self.file(index)}: damaged image ({reason})")
        return images

    def read(self, indices) -> tuple[Tensor, list[tuple[int, str]]]:
        """The readable images at `indices` (n <= N, 3, R, R) uint8, and (index, reason) of each damaged one."""
        indices = np.asarray(indices)
        if self._pixels is not None:
            return torch.from_numpy(self._pixels[indices])[:, None].repeat(1, 3, 1, 1), []
        images, damaged = [], []
        for index in indices.tolist():
            data = (self.root / self.file(index)).read_bytes()  # a failing disk or mount is not a damaged image
            try:
                images.append(_decode(data, self.resolution))
            except Exception as error:  # decoders raise nearly anything on bad bytes
                damaged.append((index, "zero bytes" if not data else f"{type(error).__name__}: {error}"))
        images = np.stack(images) if images else np.empty((0, self.resolution, self.resolution, 3), np.uint8)
        return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), damaged


def center_crop(image: Image.Image, resolution: int) -> Image.Image:
    """ADM's crop to `resolution` x `resolution`: halve with a box filter, resize with a bicubic one, cut the center.

    Halving stops when the short side is below twice the resolution. An odd margin leaves its extra pixel at the
    bottom or right.
    """
    while min(image.size) >= 2 * resolution:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = resolution / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - resolution) // 2, (image.height - resolution) // 2
    return image.crop((left, top, left + resolution, top + resolution))


def _decode(data: bytes, resolution: int) -> np.ndarray:
    """The first frame of an encoded image as cropped RGB, (R, R, 3) uint8.

    As in ADM, alpha is dropped and EXIF orientation is ignored: the pixels are taken as they are stored. Unlike ADM,
    16-bit grey keeps its high byte: Pillow's conversion would turn every value above 255 into white.
    """
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        if image.mode.startswith("I"):
            image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
        return np.asarray(center_crop(image.convert("RGB"), resolution))


def _scan(root: Path) -> tuple[list[str], list[tuple[int, str, int]]]:
    """Class names, and (label, file name, bytes) of each image, sorted. Hidden files and folders are ignored."""
    if not root.is_dir():
        raise FileNotFoundError(f"no folder {root}: expected one that holds a folder of images for each class")
    class_names = [entry.name for entry in _entries(root) if entry.is_dir()]
    if not class_names:
        loose = sum(_is_image(entry) for entry in _entries(root))
        raise ValueError(f"no class folder in {root} ({loose} images lie in it directly): put the images of each "
                         f"class into a folder named after the class")
    files = []
    for label, class_name in enumerate(class_names):
        entries = _entries(root / class_name)
        images = [entry for entry in entries if _is_image(entry)]
        if not images:
            inner = [entry.name for entry in entries if entry.is_dir()]
            hint = f" It holds folders ({', '.join(inner[:3])}): did you mean {root / class_name}?" if inner else ""
            raise ValueError(f"class folder {root / class_name} holds no image "
                             f"({', '.join(sorted(IMAGE_SUFFIXES))}).{hint}")
        files += [(label, entry.name, entry.stat().st_size) for entry in images]
    return class_names, files


def _entries(folder: Path) -> list[os.DirEntry]:
    with os.scandir(folder) as entries:
        return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)


def _is_image(entry: os.DirEntry) -> bool:
    return Path(entry.name).suffix.lower() in IMAGE_SUFFIXES and not entry.is_dir()


def first_of_each_class(labels: np.ndarray, count: int) -> np.ndarray:
    """Indices of the first `count` items of each class, in their original order."""
    return np.sort(np.concatenate([np.flatnonzero(labels == label)[:count] for label in np.unique(labels)]))


def make_embedded_images(idx_folder: str | Path, out: str | Path = EMBEDDED) -> None:
    """Write the embedded images from the published IDX files: the first 1,600 and 400 of each class of the two splits.

    The same input gives the same arrays everywhere, and the same bytes wherever Python has the original zlib.
    """
    for split, count in (("train", 1_600), ("test", 400)):
        images, labels = _read_pair(Path(idx_folder), split)
        keep = first_of_each_class(labels, count)
        write_idx(Path(out) / f"{IDX_STEMS[split]}-images-idx3-ubyte.gz", images[keep])
        write_idx(Path(out) / f"{IDX_STEMS[split]}-labels-idx1-ubyte.gz", labels[keep])


def _read_pair(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 28, 28) and labels (N,) of one split, uint8, checked against each other."""
    if split not in IDX_STEMS:
        raise ValueError(f"split is {split!r}, expected one of {', '.join(IDX_STEMS)}")
    arrays = []
    for kind in ("images-idx3", "labels-idx1"):
        path = folder / f"{IDX_STEMS[split]}-{kind}-ubyte.gz"
        arrays.append(read_idx(path if path.exists() else path.with_suffix("")))
    images, labels = arrays
    if images.shape != (len(labels), 28, 28) or labels.ndim != 1 or not len(labels):
        raise ValueError(f"{folder}, {split} split: images of shape {images.shape} and labels of shape {labels.shape}; "
                         f"expected (N, 28, 28) and (N,)")
    if labels.max() >= len(FASHION_MNIST_CLASSES):
        raise ValueError(f"{folder}, {split} split: label {labels.max()}, expected 0 to 9")
    return images, labels


def read_idx(path: str | Path) -> np.ndarray:
    """Read one IDX file of unsigned bytes, gzipped if its name ends so: (N, 28, 28) images or (N,) labels."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no IDX file {path}, nor {path.name}.gz: point at the folder that holds the four "
                                f"Fashion-MNIST files")
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zeros, dtype, ndim = struct.unpack_from(">HBB", data)
        shape = struct.unpack_from(f">{ndim}I", data, 4)
        values = np.frombuffer(data, np.uint8, offset=4 + 4 * ndim)
    except (EOFError, OSError, zlib.error, struct.error, ValueError) as error:
        raise ValueError(f"{path}: not a whole IDX file ({error}). Fetch it again.") from error
    if (zeros, dtype) != (0, 8) or values.size != np.prod(shape):
        raise ValueError(f"{path}: expected an IDX file of unsigned bytes (it starts with 00 00 08), "
                         f"found {data[:3].hex(' ')} and {values.size} values for shape {shape}")
    return values.reshape(shape)


def write_idx(path: str | Path, array: np.ndarray) -> None:
    """Write unsigned bytes as a gzipped IDX file; the same array gives the same bytes (no name, no time)."""
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    with atomic_write(path, "wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as file:
        file.write(header + np.ascontiguousarray(array).tobytes())
