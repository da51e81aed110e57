"""Training for a few steps in memory, with a Trainer's draws and without its files: for models changed by hand."""
from collections.abc import Callable, Sequence

import safetensors.torch
import torch
from torch import nn

from dit_repro.diffusion import training_losses
from dit_repro.latents import LatentStore
from dit_repro.models.mistakes import Mistake, apply_mistake
from dit_repro.progress import progress
from dit_repro.training.batches import draw_batch
from dit_repro.training.config import TrainConfig
from dit_repro.training.parallel import DEVICE
from dit_repro.training.state import build_model
from dit_repro.workers import run_each


def train_briefly(model, config: TrainConfig, store: LatentStore, desc: str = "train"):
    """Train `model` in place for config.num_steps on its device, in float32 and without EMA; returns the model.

    Step s sees the batch that a Trainer's step s sees, so models are compared on equal draws.
    """
    device = next(model.parameters()).device
    schedule = config.noise_schedule()
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, config.betas,
                                  weight_decay=config.weight_decay, fused=config.fused)
    model.train()
    for step in progress(range(1, config.num_steps + 1), desc=desc, unit="step"):
        batch = draw_batch(config, store, step).map(lambda tensor: tensor.to(device))
        losses = training_losses(model, batch.x0, batch.t, batch.y, schedule, config.objective, noise=batch.noise,
                                 input_noise=batch.input_noise)
        optimizer.zero_grad()
        losses.total.mean().backward()
        optimizer.step()
    return model.eval()


def train_each(runs: Sequence[tuple[Callable[[], nn.Module], TrainConfig]], desc: str = "train",
               processes: int | None = None) -> list[nn.Module]:
    """`train_briefly` of each (build, config), several at once as `run_each` has it; returns the models, in order.

    `build()` makes the model before training, the same at every call, and can be pickled: a partial of a function.
    """
    trained = run_each(_train_built, runs, desc, "model", processes)
    models = [build() for build, _ in runs]
    for model, weights in zip(models, trained):
        model.load_state_dict(safetensors.torch.load(weights))
    return [model.eval() for model in models]


def _train_built(run: tuple[Callable[[], nn.Module], TrainConfig]) -> bytes:
    build, config = run
    model = train_briefly(build().to(DEVICE), config, LatentStore.open(config.latents))
    return safetensors.torch.save(model.state_dict())


def build_with(mistake: Mistake, config: TrainConfig) -> nn.Module:
    """`build_model` with a mistake of chapter 2 in it, for `train_each`."""
    return apply_mistake(build_model(config), mistake)
