"""Checkpoint files: one safetensors file each, whole or not there, that says itself whether it was altered."""
import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

NAME = re.compile(r"(step|ema|alarm)-(\d{8})\.safetensors")
HEADER = "dit_repro"   # key in the safetensors metadata


class DamagedCheckpoint(RuntimeError):
    """A checkpoint file that is truncated, altered or not one of ours."""


def checkpoint_path(folder: Path, kind: str, step: int) -> Path:
    """`kind`: "step" (everything, for resuming), "ema" (exported weights) or "alarm" (the state that raised one)."""
    return Path(folder) / f"{kind}-{step:08d}.safetensors"


def list_checkpoints(folder: Path, kind: str = "step") -> list[int]:
    """Steps of the checkpoints of one kind, ascending."""
    names = (NAME.fullmatch(path.name) for path in Path(folder).glob("*"))
    return sorted(int(name[2]) for name in names if name and name[1] == kind)


def write_checkpoint(path: Path, tensors: dict[str, Tensor], scalars: dict) -> None:
    """Write to a temporary name, flush to the disk, rename over `path`: a reader sees a whole file or none.

    A digest of `scalars` and of each section of tensors (the name up to the first dot) goes into the header. Raises
    RuntimeError before writing where the disk has too little space, and leaves every earlier file as it was.
    """
    need = size_of(tensors)
    require_space(path.parent, need)
    encoded = json.dumps(scalars, allow_nan=False)
    digests = {"scalars": hashlib.sha256(encoded.encode()).hexdigest(), **section_digests(tensors)}
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        # One key: safetensors writes several in no fixed order, and equal states should be equal bytes.
        save_file(tensors, temporary, {HEADER: json.dumps({"digests": digests, "scalars": encoded})})
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise RuntimeError(f"checkpoint {path} of {need / 1e6:.1f} MB could not be written ({error}); earlier ones are "
                           "as they were. Free some space and start the run again") from error
    finally:
        temporary.unlink(missing_ok=True)
    descriptor = os.open(path.parent, os.O_RDONLY)   # the new name itself must reach the disk
    os.fsync(descriptor)
    os.close(descriptor)


def read_checkpoint(path: Path, sections: tuple[str, ...] | None = None) -> tuple[dict[str, Tensor], dict]:
    """Tensors of the given sections (all of them without) and the scalars, checked against their digests.

    Raises DamagedCheckpoint naming the file and what does not fit, FileNotFoundError where there is none.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint {path}")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})[HEADER])
            digests, scalars = header["digests"], header["scalars"]
            names = [name for name in file.keys() if not sections or name.split(".")[0] in sections]  # noqa: SIM118
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise DamagedCheckpoint(f"checkpoint {path} cannot be read: {type(error).__name__}: {error}") from error
    found = {"scalars": hashlib.sha256(scalars.encode()).hexdigest(), **section_digests(tensors)}
    wanted = ("scalars", *sections) if sections else digests
    for name in wanted:
        if found.get(name) != digests.get(name):
            raise DamagedCheckpoint(f"checkpoint {path} was altered: the checksum of its {name} does not fit")
    return tensors, json.loads(scalars)


def checkpoint_digest(path: Path) -> str:
    """A short hash of a whole checkpoint, made of the digests in its header."""
    return hashlib.sha256(json.dumps(_header(path)["digests"], sort_keys=True).encode()).hexdigest()[:16]


def read_scalars(path: Path) -> dict:
    """The scalars of a checkpoint, checked, without a look at its tensors."""
    header = _header(path)
    if hashlib.sha256(header["scalars"].encode()).hexdigest() != header["digests"]["scalars"]:
        raise DamagedCheckpoint(f"checkpoint {path} was altered: the checksum of its scalars does not fit")
    return json.loads(header["scalars"])


def _header(path: Path) -> dict:
    try:
        with safe_open(path, framework="pt") as file:
            return json.loads(file.metadata()[HEADER])
    except (SafetensorError, OSError, TypeError, KeyError, ValueError) as error:
        raise DamagedCheckpoint(f"checkpoint {path} cannot be read: {type(error).__name__}: {error}") from error


def section_digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    """SHA-256 of the names, types, shapes and bytes of each section."""
    digests = {}
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest = digests.setdefault(name.split(".")[0], hashlib.sha256())
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return {section: digest.hexdigest() for section, digest in digests.items()}


def size_of(tensors: dict[str, Tensor]) -> int:
    """Bytes of a checkpoint of these tensors, the header included, rounded up."""
    return sum(t.numel() * t.element_size() for t in tensors.values()) + 300 * len(tensors) + 65_536


def require_space(folder: Path, need: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < need:
        raise RuntimeError(f"the disk of {folder} has {free / 1e6:.1f} MB free, a checkpoint needs {need / 1e6:.1f}: "
                           "free some space, or keep fewer (keep_last, archive_every), and start the run again")


def remove_stale(folder: Path, keep_last: int, archive_every: int, pinned: set[int]) -> None:
    """Delete what the retention rule does not keep: the last k, every archive, and what an alarm has pinned stay."""
    for step in list_checkpoints(folder)[:-keep_last]:
        if step not in pinned and not (archive_every and step % archive_every == 0):
            checkpoint_path(folder, "step", step).unlink()
