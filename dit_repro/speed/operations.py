"""Where a step's time goes: every operation with its seconds, its arithmetic and the bytes that it must move."""
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from dit_repro.speed.device import synchronize

# What an operation is counted under; the first match of its name decides.
GROUPS = {
    "attention": ("scaled_dot_product", "bmm", "softmax"),
    "matrix products": ("mm", "convolution"),
    "GELU": ("gelu",),
    "layer norm": ("layer_norm",),
    "optimizer and average": ("adamw", "foreach", "lerp"),
    "copies": ("copy", "clone", "contiguous", "cat", "stack", "fill", "zero", "empty", "ones", "full"),
}
ELEMENTWISE = "other elementwise"
# Operations an element, where it is not one. A tanh counts as ten; GELU has one, and its derivative another.
PER_ELEMENT = {"gelu_backward": 25, "gelu": 15, "native_layer_norm_backward": 12, "native_layer_norm": 8, "silu": 12,
               "addcmul": 2}


@dataclass(frozen=True)
class Operation:
    """Operations of one name on one set of shapes, added up; seconds are those inside of the operator."""
    name: str              # as PyTorch's operators are named, without the overload
    shapes: tuple          # of its tensor inputs
    count: int
    seconds: float
    flops: float
    bytes: float           # of inputs and outputs, each once: the least that memory must move

    @property
    def group(self) -> str:
        return next((group for group, names in GROUPS.items() if any(name in self.name for name in names)), ELEMENTWISE)

    @property
    def intensity(self) -> float:
        """Flops a byte."""
        return self.flops / self.bytes


def measure_operations(step: Callable, device: torch.device, repeats: int = 5) -> list[Operation]:
    """The operations of one call of `step()`, backward passes included, the longest first; each the fastest of repeats.

    Every operator is waited for, so on a GPU the sum is more than the step takes: kernels no longer overlap with their
    launches. Views are left out, and what runs inside compiled code is not seen.
    """
    runs = []
    for _ in range(repeats + 1):   # the first warms up
        with _Clock(device) as clock:
            step()
        runs.append(clock.found)
    merged = {}
    for key, (count, _, flops, moved) in runs[-1].items():
        seconds = min(run[key][1] for run in runs[1:] if key in run)
        merged[key] = Operation(*key, count, seconds, flops, moved)
    return sorted(merged.values(), key=lambda operation: -operation.seconds)


def shares(operations: list[Operation]) -> dict[str, float]:
    """Share of the time by group, the largest first."""
    total = sum(operation.seconds for operation in operations)
    groups = {operation.group for operation in operations}
    found = {group: sum(o.seconds for o in operations if o.group == group) / total for group in groups}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


class _Clock(TorchDispatchMode):
    """Times each operator as autograd hands it down."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.found = {}   # (name, shapes): [count, seconds, flops, bytes]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        synchronize(self.device)
        start = time.perf_counter()
        result = function(*args, **kwargs)
        synchronize(self.device)
        seconds = time.perf_counter() - start
        if function.is_view:
            return result
        name = function._schema.name.removeprefix("aten::").strip("_")
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        entry = self.found.setdefault((name, tuple(tuple(x.shape) for x in inputs)), [0, 0.0, 0.0, 0.0])
        moved = sum(x.numel() * x.element_size() for x in (*inputs, *outputs))
        for index, amount in enumerate((1, seconds, _flops(function, name, args, kwargs, result, outputs), moved)):
            entry[index] += amount
        return result


def _flops(function, name: str, args, kwargs, result, outputs: list[Tensor]) -> float:
    if function.overloadpacket in flop_registry:
        return flop_registry[function.overloadpacket](*args, **kwargs, out_val=result)
    if name.startswith("scaled_dot_product"):   # the CPU's is not in PyTorch's list; q is (N, H, T, d)
        n, heads, tokens, width = args["backward" in name].shape
        return (10 if "backward" in name else 4) * n * heads * tokens**2 * width
    if any(word in name for word in GROUPS["copies"]):
        return 0
    return PER_ELEMENT.get(name, 1) * max((x.numel() for x in outputs), default=0)


def block_operations(block, x: Tensor, c: Tensor, repeats: int = 20) -> dict[str, Operation]:
    """The forward pass of one DiT block on x (N, T, D) and c (N, D), by the part of the block that asks for it."""
    n, tokens, width = x.shape
    rows = n * tokens
    products = {(rows, width, 3 * width): "query, key, value", (rows, width, width): "attention output",
                (rows, width, 4 * width): "MLP in", (rows, 4 * width, width): "MLP out",
                (n, width, 6 * width): "modulation"}
    names = {"native_layer_norm": "layer norm", "gelu": "GELU", "silu": "SiLU", "addcmul": "shift, scale, gate"}
    with torch.no_grad():
        found = {}
        for operation in measure_operations(lambda: block(x, c), x.device, repeats):
            if operation.name == "addmm":
                found[products[(*operation.shapes[1], operation.shapes[2][1])]] = operation
            elif operation.group == "attention":
                found["attention"] = operation
            elif operation.name in names and names[operation.name] not in found:   # the longest of that name
                found[names[operation.name]] = operation
    return found
