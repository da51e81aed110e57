"""Files of one JSON value a line, which may be read while they are written and never end in half a line."""
import errno
import json
import os
from pathlib import Path

from dit_repro.files import atomic_write


def write_if_changed(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text() != text:
        with atomic_write(path) as file:
            file.write(text)


def to_line(value: dict) -> str:
    return json.dumps(value, allow_nan=False) + "\n"


def append_line(path: Path, value: dict) -> None:
    """Add a line and flush it to the disk, so that no checkpoint outlives the lines before it."""
    with open(path, "ab", buffering=0) as file:
        size = file.tell()
        try:
            line = to_line(value).encode()
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, f"no room for a line in {path}")
            os.fsync(file.fileno())
        except OSError:
            os.truncate(path, size)   # half a line would make the next one unreadable
            raise


def read_lines(path: Path) -> list[dict]:
    """The values of a .jsonl file. A last line without its end is being written, or never was, and is left out.

    ValueError names the file and the line where one is damaged.
    """
    if not path.is_file():
        return []
    values = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            values.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: expected one JSON value, found {line[:60]!r} ({error}). Delete "
                             "the line, or restore the file from a copy") from error
    return values
