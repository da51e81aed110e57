"""Files that are never half written, and the folders of this checkout."""
import hashlib
import json
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: str | Path, mode: str = "w"):
    """Open a temporary file beside `path`; on success flush it to disk and rename it over `path`.

    A reader sees the old file or the new one. If the block raises, or the disk is full, the old file stays.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with open(descriptor, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: str | Path, value) -> None:
    """Write `value` atomically as indented JSON; NaN and infinity are refused, not written."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    with atomic_write(path) as file:
        file.write(text)


def sha256(path: str | Path) -> str:
    """SHA-256 of a file, as 64 hexadecimal digits."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
        return digest.hexdigest()


def project_root() -> Path:
    """The checkout that holds `_toc.yml`: the working directory or one above it, else the one this package is in."""
    here = Path.cwd()
    for folder in (here, *here.parents, Path(__file__).parents[1]):
        if (folder / "_toc.yml").is_file() and (folder / "book").is_dir():
            return folder
    raise FileNotFoundError(f"no _toc.yml with a book/ beside it in {here} or above: run this in a clone of the book")


def workspace() -> Path:
    """Where latents, runs and samples are kept: $DIT_REPRO_WORKSPACE, else workspace/ in the checkout."""
    return Path(os.environ.get("DIT_REPRO_WORKSPACE") or project_root() / "workspace")
