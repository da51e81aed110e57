"""Fresh pages of a training step on a CPU, with freed memory given back to the kernel and with it kept."""
import mmap
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import torch

from dit_repro.allocator import keep_freed_memory
from dit_repro.speed.device import page_faults
from dit_repro.speed.ladder import Bench, Settings, Step

PROBED_BYTES = 2**23


def fresh_pages(model: str, batch_size: int, input_size: int, settings: Settings) -> tuple[int, int] | None:
    """Pages that a step takes fresh from the kernel: (as the C library does by default, after `keep_freed_memory`).

    In a process of its own, since keeping memory cannot be undone and a trainer here may have asked for it. None where
    the system does not count such pages, and where the step runs on a GPU.
    """
    if torch.cuda.is_available():
        return None
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_count, model, batch_size, input_size, settings).result()


def _count(model: str, batch_size: int, input_size: int, settings: Settings) -> tuple[int, int] | None:
    try:
        if not page_faults(_touch):
            return None
    except ImportError:   # Windows
        return None
    step, counts = Step(Bench(model, batch_size, torch.device("cpu"), input_size), settings), []
    with step.active():
        for prepare in (lambda: None, keep_freed_memory):
            prepare()
            for _ in range(3):   # until moments are there and the C library has what it keeps
                step()
            counts.append(page_faults(step))
    return tuple(counts)


def _touch() -> None:
    """Takes pages that are surely fresh."""
    with mmap.mmap(-1, PROBED_BYTES) as block:
        for page in range(0, PROBED_BYTES, mmap.PAGESIZE):
            block[page] = 1
