"""One progress bar for a terminal, a notebook and a batch run."""
import os
import sys

from tqdm.auto import tqdm


class _Lines:
    """A file for tqdm in a batch run: each refresh is a line of its own, not a carriage return."""

    def __init__(self, write):
        self._write = write

    def write(self, text: str) -> None:
        line = text.strip("\r\n ")
        if line:
            self._write(line + "\n")

    def flush(self) -> None:
        pass


def progress(iterable=None, *, total: int | None = None, initial: int = 0, desc: str = "", unit: str = "it") -> tqdm:
    """A tqdm bar with rate and time left; in a batch run a line every 15 s instead.

    Under `dit-repro run` the kernel's lines go to the file $DIT_REPRO_PROGRESS, never into a notebook's outputs.
    """
    settings = {"iterable": iterable, "total": total, "initial": initial, "desc": desc, "unit": unit}
    if log := os.environ.get("DIT_REPRO_PROGRESS"):
        def append(line):
            with open(log, "a", encoding="utf-8") as file:
                file.write(line)
    elif sys.stderr.isatty() or "ipykernel" in sys.modules:
        return tqdm(**settings, dynamic_ncols=True)
    else:
        append = sys.stderr.write
    from tqdm.std import tqdm as text_bar
    return text_bar(**settings, ncols=80, ascii=True, mininterval=15, maxinterval=30, file=_Lines(append))
