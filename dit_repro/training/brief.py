"""Training for a few steps in memory, with a Trainer's draws and without its files: for models changed by hand."""
import torch

from dit_repro.diffusion import NoiseSchedule, training_losses
from dit_repro.latents import LatentStore
from dit_repro.progress import progress
from dit_repro.training.batches import NUM_TIMESTEPS, draw_batch
from dit_repro.training.config import TrainConfig


def train_briefly(model, config: TrainConfig, store: LatentStore, desc: str = "train"):
    """Train `model` in place for config.num_steps on its device, in float32 and without EMA; returns the model.

    Step s sees the batch that a Trainer's step s sees, so models are compared on equal draws.
    """
    device = next(model.parameters()).device
    schedule = getattr(NoiseSchedule, config.schedule)(NUM_TIMESTEPS)
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
