"""What a run will cost, worked out from its settings before anything is paid for: memory, disk and hours."""
from dataclasses import dataclass

import torch

from dit_repro.models import DiT, count_macs, count_parameters, create_model
from dit_repro.training import TrainConfig

IMAGENET_IMAGES = 1_281_167
# Share of the stated peak that a run reaches. The replication post's bf16, compiled runs on an H100 reached 34% (B/2,
# 105.1 ms a step of 256) and 37% (XL/2, 246.9 ms a step of 128), by the same count of operations.
UTILIZATION = 0.35


@dataclass(frozen=True)
class GPU:
    """A device by its maker's numbers: memory in bytes, dense peaks in flop/s (half of those quoted with sparsity)."""
    name: str
    memory: float
    bf16: float
    tf32: float
    fp32: float
    source: str


GPUS = {
    "a100": GPU("NVIDIA A100 SXM 80 GB", 80e9, 312e12, 156e12, 19.5e12, "NVIDIA A100 datasheet"),
    "h100": GPU("NVIDIA H100 SXM", 80e9, 989e12, 495e12, 67e12, "NVIDIA H100 datasheet"),
    "h200": GPU("NVIDIA H200 SXM", 141e9, 989e12, 495e12, 67e12, "NVIDIA H200 datasheet"),
    "l40s": GPU("NVIDIA L40S", 48e9, 362e12, 183e12, 91.6e12, "NVIDIA L40S datasheet"),
    "rtx4090": GPU("NVIDIA RTX 4090", 24e9, 165e12, 82.6e12, 82.6e12, "NVIDIA Ada architecture whitepaper"),
}


@dataclass(frozen=True)
class Memory:
    """Bytes on one device in a training step. A CUDA context and the allocator's gaps come on top: about 1-2 GB."""
    weights: float
    gradients: float
    moments: float        # AdamW's two
    ema: float
    buckets: float        # DDP's copy of the gradients, for the all-reduce
    activations: float    # what autograd keeps of the forward pass
    recomputed: float     # with checkpointing, the one block that the backward pass has computed again

    @property
    def peak(self) -> float:
        """Activations go as gradients come, so the top is at the start or at the end of the backward pass."""
        state = self.weights + self.moments + self.ema + self.buckets
        return state + self.recomputed + max(self.activations, self.gradients)


@dataclass(frozen=True)
class Plan:
    """The cost of a run; bytes, seconds and counts."""
    model: str
    gpu: GPU
    gpus: int
    utilization: float
    images: int
    num_steps: int
    global_batch_size: int
    images_per_forward: int
    parameters: int
    macs: int                    # of one forward pass of one image
    memory: Memory               # as the run is configured
    memory_checkpointed: Memory  # with activation checkpointing, whatever the run says
    latents: float               # disk
    checkpoint: float            # disk, one of them
    checkpoints: float           # disk, all that the retention rule keeps
    step_seconds: float

    @property
    def hours(self) -> float:
        return self.step_seconds * self.num_steps / 3600

    def lines(self) -> list[str]:
        """What `dit-repro plan` prints."""
        def size(count):
            return f"{count / 1e9:.2f} GB"

        def parts(memory):
            shown = {name: value for name, value in vars(memory).items() if value}
            return ", ".join(f"{name} {size(value)}" for name, value in shown.items())

        def verdict(memory):
            fits = "fits" if memory.peak < 0.95 * self.gpu.memory else "DOES NOT FIT"
            return f"peak {size(memory.peak)}, {fits} {self.gpu.memory / 1e9:.0f} GB ({parts(memory)})"

        return [
            f"model         {self.model}: {self.parameters:,} parameters, {self.macs / 1e9:.2f} G multiply-accumulates "
            "an image",
            f"devices       {self.gpus} x {self.gpu.name} ({self.gpu.source}), {self.images_per_forward} images a "
            "forward pass on each",
            f"memory        {verdict(self.memory)}",
            f"checkpointed  {verdict(self.memory_checkpointed)}",
            f"disk          latents {size(self.latents)} for {self.images:,} images; checkpoints "
            f"{size(self.checkpoints)}, {size(self.checkpoint)} each",
            f"time          {self.hours:.1f} hours for {self.num_steps:,} steps of {self.global_batch_size} images: "
            f"{self.step_seconds * 1e3:.1f} ms a step at {self.utilization:.0%} of the stated peak; time between GPUs "
            "and for the optimizer is not counted",
        ]


def plan_run(config: TrainConfig, images: int = IMAGENET_IMAGES, gpu: str = "h100", gpus: int = 1,
             utilization: float = UTILIZATION) -> Plan:
    """The cost of a run on `gpus` devices of a kind in GPUS, over latents of `images` images. Needs no GPU.

    Time: two flops a multiply-accumulate, three forward passes' worth a step (four with activation checkpointing).
    Raises ValueError for an unknown device and for a batch that the devices cannot share.
    """
    if gpu not in GPUS:
        raise ValueError(f"unknown GPU {gpu!r}: expected one of {', '.join(GPUS)}")
    if gpus < 1 or config.global_batch_size % gpus:
        raise ValueError(f"{gpus} GPUs cannot share a global batch of {config.global_batch_size}: use a divisor")
    if not 0 < utilization <= 1:
        raise ValueError(f"utilization {utilization}: expected a share of the peak, above 0 and at most 1")
    with torch.device("meta"):
        model = create_model(config.model, input_size=config.input_size, in_channels=config.in_channels,
                             num_classes=config.num_classes, learn_sigma=config.objective.learn_sigma)
    if not isinstance(model, DiT):
        raise ValueError(f"no plan for {config.model}: the memory of a forward pass is worked out for DiTs only")
    device, macs = GPUS[gpu], count_macs(model)
    batch = min(config.micro_batch_size or config.global_batch_size, config.global_batch_size // gpus)
    peak = device.bf16 if config.precision in ("bf16", "fp16") else getattr(device, config.precision)
    passes = 4 if config.activation_checkpointing else 3
    row = 2 * 2 * config.in_channels * config.input_size**2 * 2 + 8   # plain and flipped, two moments, float16; a label
    weights = 4 * count_parameters(model)
    exports = config.num_steps // config.export_ema_every if config.export_ema_every else 0
    return Plan(
        config.model, device, gpus, utilization, images, config.num_steps, config.global_batch_size, batch,
        count_parameters(model), macs,
        training_memory(model, batch, config.precision, config.activation_checkpointing, gpus, config.parallel),
        training_memory(model, batch, config.precision, True, gpus, config.parallel),
        latents=images * row, checkpoint=4 * weights,
        checkpoints=checkpoints_kept(config) * 4 * weights + exports * weights,
        step_seconds=passes * 2 * macs * config.global_batch_size / (gpus * utilization * peak))


def checkpoints_kept(config: TrainConfig) -> int:
    """Checkpoints on the disk at the end of a run without alarms: the last ones and the archive."""
    steps = sorted({*range(config.checkpoint_every, config.num_steps, config.checkpoint_every), config.num_steps})
    archive = {step for step in steps if config.archive_every and step % config.archive_every == 0}
    return len(archive.union(steps[-config.keep_last:]))


def training_memory(model: DiT, batch_size: int, precision: str = "fp32", checkpointing: bool = False, gpus: int = 1,
                    parallel: str = "ddp") -> Memory:
    """Bytes on one device when a step of `batch_size` images runs eagerly; torch.compile keeps less.

    FSDP is counted as an even share of the state, without the block that is gathered at the moment.
    """
    weights = 4 * count_parameters(model) / (gpus if parallel == "fsdp" else 1)
    buckets = weights if gpus > 1 and parallel == "ddp" else 0
    return Memory(weights, weights, 2 * weights, weights, buckets,
                  *activation_bytes(model, batch_size, precision, checkpointing))


def activation_bytes(model: DiT, batch_size: int, precision: str = "fp32",
                     checkpointing: bool = False) -> tuple[float, float]:
    """What autograd keeps of a forward pass of `batch_size` images with fused attention, and what it computes again.

    A block keeps 20 tensors of (N, T, D). Under autocast the residual stream and what is normalized stay float32 (4 of
    them) and the inputs and outputs of matrix products are half as wide (16: a third of them around the 4D-wide GELU).
    """
    config, n = model.config, batch_size
    full, half = 4, 2 if precision in ("bf16", "fp16") else 4   # bytes
    size = model.input_size
    tokens, width, patch = (size // config.patch_size) ** 2, config.width, config.patch_size
    stream = n * tokens * width     # elements of one (N, T, D)
    vector = n * width              # of one (N, D)
    block = stream * (4 * full + 16 * half) + 9 * vector * half + n * tokens * (4 + config.heads) * full
    last = stream * (2 * full + half) + 2 * vector * half + 2 * n * tokens * full
    condition = vector * (full + 2 * half) + n * model.t_embedder.mlp[0].in_features * half
    loss = 15 * n * model.in_channels * size**2 * full   # latents, noise, and the steps of the bound's arithmetic
    copies = 0                                           # autocast's half-precision weights
    if half < full:
        copies = half * sum(p.numel() for name, p in model.named_parameters()
                            if p.ndim == 2 and not name.startswith("y_embedder"))   # a table is looked up, not cast
        loss += n * tokens * patch**2 * model.out_channels * half
    kept = last + condition + loss + copies
    if checkpointing:
        return config.depth * stream * full + kept, block - stream * full
    return config.depth * block + kept, 0
