"""What a step is given: the batch of step s is a function of (seed, s) alone, on however many ranks it is drawn."""
import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from dit_repro.latents import LatentStore
from dit_repro.training.config import NUM_TIMESTEPS

# Each kind of draw has its own stream, so that a run without flips or with another objective sees the same noise.
ORDER, FLIP, LATENT, TIMESTEP, NOISE, LABEL = range(6)


@dataclass(frozen=True)
class Batch:
    """One rank's share of a global batch; field by field the inputs of `training_losses`."""
    indices: Tensor              # (N,) int64, rows of the latent store
    x0: Tensor                   # (N, C, H, W) float32
    t: Tensor                    # (N,) int64
    y: Tensor                    # (N,) int64, dropped labels already replaced by num_classes
    noise: Tensor                # (N, C, H, W), the target
    input_noise: Tensor          # (N, C, H, W), what is added to x0: `noise` itself without input perturbation

    def __len__(self) -> int:
        return len(self.indices)

    def map(self, function) -> "Batch":
        return Batch(*(function(getattr(self, field.name)) for field in fields(self)))

    def split(self, size: int) -> list["Batch"]:
        return [self.map(lambda tensor, start=start: tensor[start:start + size]) for start in range(0, len(self), size)]


def generator(seed: int, *words: int) -> torch.Generator:
    """A CPU generator that depends on these numbers and on nothing else."""
    state = np.random.SeedSequence((seed, *words)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))


@lru_cache(maxsize=2)   # a batch spans two epochs at most, unless the data is smaller than a batch
def epoch_order(seed: int, epoch: int, num_images: int) -> Tensor:
    """The order in which one epoch visits the images, (num_images,) int64: each once."""
    return torch.randperm(num_images, generator=generator(seed, ORDER, epoch))


def batch_indices(seed: int, step: int, batch_size: int, num_images: int) -> Tensor:
    """Images of global batch `step` (1 for the first), (batch_size,) int64. Epochs follow one another with no gap."""
    positions = torch.arange((step - 1) * batch_size, step * batch_size)
    epochs = positions // num_images
    return torch.cat([epoch_order(seed, int(epoch), num_images)[positions[epochs == epoch] % num_images]
                      for epoch in epochs.unique()])


def draw_batch(config, store, step: int, rank: int = 0, world_size: int = 1, retry: int = 0) -> Batch:
    """Rank `rank`'s share of the global batch of step `step` (1 for the first).

    Every rank draws the noise of the whole batch and keeps its slice: cheaper than a generator for each image. `retry`
    counts roll-backs: without new noise a step that diverged would diverge again.
    """
    n = config.global_batch_size
    shape = (n, config.in_channels, config.input_size, config.input_size)
    share = slice(rank * n // world_size, (rank + 1) * n // world_size)

    def stream(kind):
        return generator(config.seed, kind, step, retry)

    indices = batch_indices(config.seed, step, n, len(store))[share]
    flipped = torch.rand(n, generator=stream(FLIP))[share] < (0.5 if config.flip else 0)
    latent_noise = torch.randn(shape, generator=stream(LATENT))[share]
    t = torch.randint(NUM_TIMESTEPS, (n,), generator=stream(TIMESTEP))[share]
    noise, input_noise = config.objective.draw_noise(shape, stream(NOISE))
    labels = torch.as_tensor(np.asarray(store.labels))[indices]
    dropped = torch.rand(n, generator=stream(LABEL))[share] < config.label_dropout
    return Batch(indices, store.latents(indices, flipped, latent_noise), t,
                 labels.masked_fill(dropped, config.num_classes), noise[share], input_noise[share])


def batches_from(config, store, step: int, ranks, retry: int = 0):
    """This rank's batches of steps `step`, `step` + 1, ... to the last; the next is read while one is used."""
    on_gpu = ranks.device.type == "cuda"

    def draw(step):
        batch = draw_batch(config, store, step, ranks.rank, ranks.world_size, retry)
        return batch.map(Tensor.pin_memory) if on_gpu else batch

    if not on_gpu:
        # Drawing takes a hundredth of a step, and a second thread with OpenMP work of its own makes libgomp sleep
        # at barriers instead of spinning, since threads then outnumber cores: steps took half as long again.
        yield from map(draw, range(step, config.num_steps + 1))
        return
    with ThreadPoolExecutor(1) as reader:
        pending = reader.submit(draw, step)
        for following in range(step + 1, config.num_steps + 2):
            batch = pending.result()
            if following <= config.num_steps:
                pending = reader.submit(draw, following)
            yield batch.map(lambda tensor: tensor.to(ranks.device, non_blocking=True))


def open_latents(config, world_size: int) -> LatentStore:
    """The run's latents; ValueError naming both values where they or the number of ranks do not fit the config."""
    store = LatentStore.open(config.latents)
    shape = (config.in_channels, config.input_size, config.input_size)
    if tuple(store.latent_shape) != shape or store.num_classes != config.num_classes:
        raise ValueError(f"{config.latents} holds latents {tuple(store.latent_shape)} of {store.num_classes} classes; "
                         f"the config expects {shape} of {config.num_classes} (in_channels, input_size, num_classes)")
    if config.global_batch_size % world_size:
        raise ValueError(f"global_batch_size = {config.global_batch_size} cannot be shared by {world_size} processes: "
                         "use a multiple")
    return store


def latents_digest(store: LatentStore) -> str:
    """What the store's checksums amount to: a run resumed on other data would be another run."""
    parts = [store.manifest["labels_sha256"], *(shard["sha256"] for shard in store.manifest["shards"])]
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]
