"""One process or many: which device a rank uses, how the model is wrapped, and whole tensors from shards."""
import os
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"   # of whatever runs as one process; ranks have their own
# The main rank verifies latents, writes checkpoints or computes scores alone, for hours on ImageNet. The others wait
# in a collective for so long, and the default of ten minutes (NCCL) or half an hour (gloo) would end the run.
PATIENCE = timedelta(days=1)


@dataclass(frozen=True)
class Ranks:
    """This process among its peers."""
    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place; every rank gets the same bits."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether any rank says yes. It travels between CPUs, so no device waits for it."""
        return bool(self.sum(torch.tensor(int(flag))))

    def wait(self) -> None:
        """Until every rank is here: of one that leaves with an error code a scheduler may end the others at once."""
        self.any(False)

    def from_main(self, value):
        """The main rank's value, on every rank."""
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]


@contextmanager
def connect():
    """The `Ranks` that torchrun's environment describes (RANK, WORLD_SIZE, LOCAL_RANK); one process without it.

    LOCAL_RANK picks the GPU, since ranks go on counting on the second machine.
    """
    world_size, local_rank = (int(os.environ.get(name, default)) for name, default in
                              (("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise RuntimeError(f"LOCAL_RANK is {local_rank} and this machine has {torch.cuda.device_count()} GPUs: "
                               "start one process a GPU (torchrun --nproc-per-node)")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if world_size == 1:
        yield Ranks(0, 1, device)
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    try:
        yield Ranks(dist.get_rank(), world_size, device)
    finally:
        dist.destroy_process_group()


def device_name(device: torch.device) -> str:
    """What a reader of its numbers has to know it by: a GPU's product name; a CPU's cores and vector instructions."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"


def wrap(model: nn.Module, how: str, ranks: Ranks) -> nn.Module:
    """The module to call in training: the model alone, in DDP, or sharded in place block by block (FSDP2)."""
    if ranks.world_size == 1:
        return model
    if how == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard  # takes a second and a half to import, and few runs need it
        mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
        for block in getattr(model, "blocks", ()):
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return DistributedDataParallel(model, device_ids=[ranks.device] if ranks.device.type == "cuda" else None)


def accumulating(wrapped: nn.Module, more_to_come: bool):
    """A context for one micro-batch: gradients travel between ranks only with the last one."""
    if hasattr(wrapped, "set_requires_gradient_sync"):   # an FSDPModule
        wrapped.set_requires_gradient_sync(not more_to_come)
    elif isinstance(wrapped, DistributedDataParallel) and more_to_come:
        return wrapped.no_sync()
    return nullcontext()


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor; any other tensor as it is."""
    return tensor.to_local() if _is_sharded(tensor) else tensor


def gather(tensor: Tensor) -> Tensor:
    """The whole tensor where it is, detached; all ranks must call it."""
    return (tensor.full_tensor() if _is_sharded(tensor) else tensor).detach()


def like(whole: Tensor, target: Tensor) -> Tensor:
    """A copy of a whole CPU tensor, placed and sharded like `target`."""
    placed = whole.to(target.device, copy=True)
    if _is_sharded(target):
        from torch.distributed.tensor import distribute_tensor
        return distribute_tensor(placed, target.device_mesh, target.placements, src_data_rank=None)
    return placed


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")   # a DTensor
