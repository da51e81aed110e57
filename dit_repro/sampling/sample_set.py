"""Samples as a set of images that can be asked for by position: what a score needs, with no picture on disk."""
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from dit_repro.diffusion import NoiseSchedule
from dit_repro.latents import Autoencoder

from .cells import Models, describe_cell, sample_cell
from .guidance import NO_GUIDANCE

BLOCK = 250   # images a file of latents; evaluation's shards are a multiple of it, so no two ranks draw one block


class SampleSet:
    """The images that a model draws for `labels` (N,): image i has seed first_seed + i, whoever draws it and when.

    A source of images for evaluation's `evaluate` and `extract`, in one process or many: a block of latents is sampled
    when one of its images is first asked for, kept in `folder`, and decoded each time. `settings` are those of
    `sample`; `label_policy` says in words how the labels were chosen.
    """

    def __init__(self, model: nn.Module, labels, schedule: NoiseSchedule, autoencoder: Autoencoder, folder: str | Path,
                 label_policy: str, first_seed: int = 0, **settings):
        self.labels = torch.as_tensor(labels)
        self._autoencoder, self._folder, self._models = autoencoder, Path(folder), Models()
        self._settings = {"model": model, "schedule": schedule, **settings}
        self._seeds = range(first_seed, first_seed + len(self.labels))
        described = describe_cell({**self._settings, "labels": self.labels, "seeds": self._seeds}, (label_policy,))
        guidance = settings.get("guidance", NO_GUIDANCE)
        sampler = {name: value for name, value in described.items()
                   if name not in ("labels", "seeds", "steps", "guidance", "schedule")}
        self.protocol = {   # fields of evaluation's Protocol
            "label_policy": label_policy, "seeds": f"{self._seeds[0]} to {self._seeds[-1]}",
            "guidance": "none" if guidance.scale == 1 else repr(guidance),
            "sampler": f"{schedule.name} schedule, {json.dumps(sampler)}",
            "num_steps": schedule.respaced(described["steps"]).num_steps,
            "checkpoint_sha256": self._models(model)[1], "autoencoder_sha256": autoencoder.sha256}
        address = json.dumps({**described, "model": self.protocol["checkpoint_sha256"],
                              "autoencoder": autoencoder.sha256})
        self.identity = {"kind": "samples", "sha256": hashlib.sha256(address.encode()).hexdigest()}

    def __len__(self) -> int:
        return len(self.labels)

    def latents(self, positions) -> Tensor:
        """(n, C, h, w) float32 on the CPU, of images at `positions`."""
        positions, made = list(positions), {}
        for block in sorted({position // BLOCK for position in positions}):
            some = slice(block * BLOCK, (block + 1) * BLOCK)
            settings = {"batch_size": BLOCK, **self._settings, "labels": self.labels[some], "seeds": self._seeds[some]}
            latents, _ = sample_cell(self._folder, self._models, settings, describe_cell(settings, ("block", block)))
            made |= dict(zip(range(some.start, some.stop), latents))
        return torch.stack([made[position] for position in positions])

    def images(self, positions, change: Callable[[Tensor], Tensor] = lambda latents: latents) -> Tensor:
        """(n, 3, H, W) uint8, of images at `positions`; `change` plants a fault between sampler and decoder."""
        return torch.cat([self._autoencoder.decode(change(part)) for part in self.latents(positions).split(64)])
