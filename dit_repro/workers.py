"""Independent pieces of work, as many at once as a CPU has cores."""
import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from dit_repro.allocator import keep_freed_memory
from dit_repro.progress import progress


def run_each(function: Callable, items: Iterable, desc: str, unit: str, processes: int | None = None) -> list:
    """`function(item)` of each item, in order, each on one thread, in `processes` workers; None: one a core.

    A small model's step is too short to be shared between cores: two of them side by side take as long as one on two
    threads. On one thread also alone, so that numbers do not depend on the company. 0 calls in this process, as does
    None for a single item and where there is a GPU. Function and items are pickled. The first error is raised; what has
    not begun by then does not begin.
    """
    if processes is not None and processes < 0:
        raise ValueError(f"processes={processes}: expected at least 0, which is in this process, or None")
    items, on_gpu = list(items), torch.cuda.is_available()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()   # not on macOS
    count = processes if processes is not None else 0 if on_gpu else cores
    if count == 0 or len(items) <= 1:
        keep_freed_memory()
        threads = torch.get_num_threads()
        torch.set_num_threads(threads if on_gpu else 1)
        try:
            return [function(item) for item in progress(items, desc=desc, unit=unit)]
        finally:
            torch.set_num_threads(threads)
    pool = ProcessPoolExecutor(min(count, len(items)), multiprocessing.get_context("spawn"), _settle)
    try:
        running = [pool.submit(function, item) for item in items]
        for done in progress(as_completed(running), total=len(running), desc=desc, unit=unit):
            done.result()
        return [done.result() for done in running]
    finally:
        pool.shutdown(cancel_futures=True)


def _settle() -> None:
    """A worker uses one core, and leaves the progress bar to its parent."""
    torch.set_num_threads(1)
    keep_freed_memory()
    os.environ["DIT_REPRO_PROGRESS"] = os.devnull
