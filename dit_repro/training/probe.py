"""The loss taken apart by timestep, on the same images and the same noise each time it is asked."""
import torch
from torch import Tensor

from dit_repro.training.batches import NOISE, generator


@torch.no_grad()
def loss_by_timestep(model, x0: Tensor, labels: Tensor, schedule, timesteps, seed: int = 0,
                     batch_size: int = 256) -> Tensor:
    """Noise MSE of each image at each timestep, (len(timesteps), N) float32, on the CPU.

    x0: (N, C, H, W) latents; labels: (N,); timesteps: indices into `schedule`. The noise of a timestep depends on
    `seed` and that timestep alone, so two checkpoints, or two lists of timesteps, are compared on equal terms.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        rows = []
        for timestep in map(int, timesteps):
            noise = torch.randn(x0.shape, generator=generator(seed, NOISE, timestep))   # (N, C, H, W)
            row = []
            for part in range(0, len(x0), batch_size):
                x, y, eps = (v[part:part + batch_size].to(device) for v in (x0, labels, noise))
                t = torch.full_like(y, timestep)
                output = model(schedule.add_noise(x, t, eps), schedule.model_timesteps(t), y)   # (n, C or 2C, H, W)
                row.append((output[:, :x.shape[1]] - eps).square().flatten(1).mean(1).cpu())
            rows.append(torch.cat(row))
        return torch.stack(rows)
    finally:
        model.train(was_training)
