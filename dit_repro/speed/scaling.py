"""Two ranks and what they cost each other: computing, summing gradients, and how much of one hides behind the other."""
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from dit_repro.diffusion import NoiseSchedule, Objective, training_losses
from dit_repro.files import write_json
from dit_repro.models import create_model
from dit_repro.speed.device import synchronize


@dataclass(frozen=True)
class Scaling:
    """Medians over the rounds, in seconds a step; the slowest rank counts."""
    ranks: int
    images_per_rank: int
    alone: float          # one rank computes while the others wait
    compute: float        # all ranks compute, nothing travels (DDP's no_sync)
    together: float       # all ranks compute and sum their gradients
    all_reduce: float     # the same bytes summed with nothing else to do
    bytes: int            # of gradients that DDP hands to the all-reduce in a step

    @property
    def efficiency(self) -> float:
        """Of a rank among others against a rank alone: 1 where n ranks do n times the work in the same time."""
        return self.alone / self.together

    @property
    def contention(self) -> float:
        """Share of a step lost to neighbors who compute as well: cores, caches and memory, not messages."""
        return (self.compute - self.alone) / self.together

    @property
    def exposed(self) -> float:
        """Seconds of the sum that the backward pass does not hide."""
        return self.together - self.compute

    @property
    def hidden(self) -> float:
        """Share of the sum that runs behind the backward pass; 0 where a step takes longer than both in a row."""
        return min(1.0, max(0.0, 1 - self.exposed / self.all_reduce))


def measure_scaling(model_name: str, images_per_rank: int, input_size: int, ranks: int = 2,
                    repeats: int = 5) -> Scaling:
    """Time DDP's parts with `ranks` processes, of one thread each over gloo, or of one GPU each over NCCL."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (ranks, folder, model_name, images_per_rank, input_size, repeats), ranks)
        return Scaling(**json.loads((Path(folder) / "scaling.json").read_text(encoding="utf-8")))


def _rank(rank: int, ranks: int, folder: str, model_name: str, images: int, input_size: int, repeats: int) -> None:
    on_gpus = torch.cuda.device_count() >= ranks
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpus else "gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = create_model(model_name, input_size=input_size).to(device)
    wrapped = DistributedDataParallel(model, device_ids=[device] if on_gpus else None)
    sent = []

    def counting(group, bucket):
        sent.append(bucket.buffer().nbytes)
        return allreduce_hook(group, bucket)

    wrapped.register_comm_hook(dist.group.WORLD, counting)
    schedule, objective = NoiseSchedule.linear(), Objective()
    x0, noise = torch.randn((2, images, 4, input_size, input_size), device=device)
    t, y = torch.randint(1000, (images,), device=device), torch.randint(1000, (images,), device=device)

    def step(module):
        training_losses(module, x0, t, y, schedule, objective, noise=noise).total.mean().backward()
        module.zero_grad()

    def compute():
        with wrapped.no_sync():
            step(wrapped)

    for _ in range(2):   # DDP rebuilds its buckets after the first step
        sent.clear()
        step(wrapped)
    gradients = torch.zeros(sum(sent) // 4, device=device)
    parts = {"alone": lambda: rank or step(model), "compute": compute, "together": lambda: step(wrapped),
             "all_reduce": lambda: dist.all_reduce(gradients)}
    times = {name: [] for name in parts}
    for _ in range(repeats + 1):
        for name, part in parts.items():
            slowest = torch.tensor(_timed(part, device), device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times[name].append(float(slowest))
    if rank == 0:
        medians = {name: statistics.median(values[1:]) for name, values in times.items()}   # the first warms up
        write_json(Path(folder) / "scaling.json", {"ranks": ranks, "images_per_rank": images,
                                                    "bytes": gradients.nbytes, **medians})
    dist.destroy_process_group()


def _timed(part, device: torch.device) -> float:
    dist.barrier()
    synchronize(device)
    start = time.perf_counter()
    part()
    synchronize(device)
    return time.perf_counter() - start


@dataclass(frozen=True)
class Link:
    """What connects the ranks: bytes a second in one direction, for each GPU, by its maker's numbers."""
    name: str
    bandwidth: float


NVLINK = Link("NVLink 4, within a machine of 8", 450e9)                  # NVIDIA H100 datasheet: 900 GB/s both ways
INFINIBAND = Link("InfiniBand NDR, 400 Gb/s for each GPU", 50e9)


def all_reduce_seconds(gradient_bytes: float, gpus: int, link: Link) -> float:
    """A ring moves 2 (n - 1) / n of the bytes through every link."""
    return 2 * (gpus - 1) / gpus * gradient_bytes / link.bandwidth


def scaled_step(compute_seconds: float, gradient_bytes: float, gpus: int, link: Link) -> tuple[float, float]:
    """Seconds of a step with the sum hidden as far as it can be, and with nothing hidden.

    The backward pass is two thirds of a step, so that is the most behind which the sum can hide.
    """
    travel = all_reduce_seconds(gradient_bytes, gpus, link)
    return compute_seconds + max(0.0, travel - 2 / 3 * compute_seconds), compute_seconds + travel
