"""What a device does: its fastest matrix product, and the memory that a step takes at its peak."""
import time
import weakref
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dit_repro.training.precision import matmul_precision


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@lru_cache
def matmul_ceiling(device: torch.device, precision: str) -> float:
    """The most flop/s that a square matrix product of this device reaches in a precision, of two sizes."""
    best = 0.0
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for size in (4096, 8192) if device.type == "cuda" else (1024, 2048):
        a = torch.randn(size, size, device=device).to(dtype)
        with matmul_precision(precision):
            for _ in range(6):   # the first warms up
                synchronize(device)
                start = time.perf_counter()
                a @ a
                synchronize(device)
                best = max(best, 2 * size**3 / (seconds := time.perf_counter() - start))
                if seconds > 0.5:
                    break   # a product this slow is not slow for want of warmth
    return best


def memory_bandwidth(device: torch.device) -> float:
    """Bytes a second of the fastest of some copies: half of them read, half written, more than any cache holds."""
    size = 2**30 if device.type == "cuda" else 2**28
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(6):   # the first warms up
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best = max(best, 2 * size / (time.perf_counter() - start))
    return best


def page_faults(step: Callable) -> int:
    """Pages that the kernel hands to this process, zeroed, during `step()`. Not on Windows."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def peak_above(step: Callable, device: torch.device) -> int:
    """Bytes that `step()` needs at its worst moment, above what is allocated before it.

    On a CPU it sees what the operators return: not their inner workspace, and nothing inside compiled code.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with _Watch() as watch:
        step()
    return watch.peak


class _Watch(TorchDispatchMode):
    """Adds a storage when an operator returns it for the first time, takes it off when it is freed."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.seen = {}   # id of a storage: its bytes

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        old = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and id(storage) not in self.seen and id(storage) not in old:
                self.seen[id(storage)] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, id(storage))
        return result

    def _freed(self, key: int) -> None:
        self.now -= self.seen.pop(key)
