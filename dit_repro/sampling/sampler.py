"""The sampling loop: one seed per image, states as they come, every mode as it was found."""
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dit_repro.allocator import keep_freed_memory
from dit_repro.diffusion import NoiseSchedule
from dit_repro.progress import progress

from .guidance import NO_GUIDANCE, Guidance, guided_output
from .solvers import SeededNoise, create_solver


@dataclass(frozen=True)
class State:
    """One step of the sampler; each tensor (N, C, H, W)."""
    timestep: float  # original timestep, which the network was given
    x_t: Tensor      # what the network was given
    x0: Tensor       # what it predicts, guided, before x0_transform
    sample: Tensor   # the state after the step, in the solver's own scale; of the last step, the finished latents


def sample(model: nn.Module, labels, schedule: NoiseSchedule, steps: str | int = "250", *, seeds: Sequence[int],
           method="ddpm", eta: float = 0.0, variance: str | None = None, guidance: Guidance = NO_GUIDANCE,
           x0_transform: Callable[[Tensor], Tensor] | None = None, epsilon_scale: float = 1.0,
           batch_size: int = 64) -> Tensor:
    """Latents (N, C, H, W) float32 on the model's device, for `labels` (N,) and one seed per image.

    An image depends on its label and seed, not on its batch. Settings are those of `sample_states`. For half precision,
    call under torch.autocast: the sampler's own arithmetic stays float32.
    """
    labels, seeds = _check_images(model, labels, seeds)
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: expected at least 1")
    _check_scale(epsilon_scale)
    solver = create_solver(method, schedule, steps, eta, variance, model.learn_sigma)
    batches = range(0, len(labels), batch_size)
    finished = []
    with progress(total=len(batches) * len(solver.timesteps), desc="sampling", unit="step") as bar:
        for first in batches:
            some = slice(first, first + batch_size)
            for state in _states(model, labels[some], seeds[some], solver, schedule.num_train_steps, guidance,
                                 x0_transform, epsilon_scale):
                latents = state.sample
                bar.update()
            finished.append(latents)
    return torch.cat(finished)


def sample_states(model: nn.Module, labels, schedule: NoiseSchedule, steps: str | int = "250", *, seeds: Sequence[int],
                  method="ddpm", eta: float = 0.0, variance: str | None = None, guidance: Guidance = NO_GUIDANCE,
                  x0_transform: Callable[[Tensor], Tensor] | None = None,
                  epsilon_scale: float = 1.0) -> Iterator[State]:
    """Yield the `State` of every step, all images in one batch.

    `steps`: as NoiseSchedule.respaced, of the schedule the model was trained with. `method`: "ddpm", "ddim", or a
    diffusers scheduler class or instance. `eta`: of DDIM. `variance`: of DDPM, "learned", "fixed_small" or
    "fixed_large"; None takes the learned one where the model has it, else the small. `epsilon_scale` divides the
    predicted noise, a remedy for exposure bias; values just above 1 are usual (arXiv 2308.15321). Settings are checked
    at the call, and between states grad mode and train/eval mode are the caller's. Raises ValueError.
    """
    labels, seeds = _check_images(model, labels, seeds)
    _check_scale(epsilon_scale)
    solver = create_solver(method, schedule, steps, eta, variance, model.learn_sigma)
    return _states(model, labels, seeds, solver, schedule.num_train_steps, guidance, x0_transform, epsilon_scale)


def _states(model, labels, seeds, solver, num_train_steps, guidance, x0_transform, epsilon_scale) -> Iterator[State]:
    keep_freed_memory()
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    labels = labels.to(device)
    channels = model.in_channels
    draw = SeededNoise(seeds, (channels, model.input_size, model.input_size), device)
    x, modules = solver.start(draw()), list(model.modules())
    for step, timestep in enumerate(solver.timesteps):
        a = solver.alphas_cumprod[step]
        with torch.no_grad(), _eval_mode(modules):  # never held across the yield: the consumer may stop there for good
            x_t = solver.network_input(x, step)
            output = guided_output(model, x_t, timestep, labels, guidance, num_train_steps).float()
            eps, values = output[:, :channels] / epsilon_scale, output[:, -channels:]
            x0 = used_x0 = (x_t - math.sqrt(1 - a) * eps) / math.sqrt(a)
            if x0_transform is not None:
                used_x0 = x0_transform(x0)
                eps = (x_t - math.sqrt(a) * used_x0) / math.sqrt(1 - a)  # else a solver walks on toward the raw x0
            x = solver.advance(x, step, used_x0, eps, values, draw)
        yield State(timestep, x_t, x0, x)


@contextmanager
def _eval_mode(modules: list[nn.Module]):
    """Eval mode inside; outside, each module in the mode it had, also one that was frozen apart from its parent."""
    training = [module for module in modules if module.training]
    for module in training:
        module.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _check_scale(epsilon_scale: float) -> None:
    if not 0 < epsilon_scale < math.inf:
        raise ValueError(f"epsilon_scale={epsilon_scale}: expected a number above 0, usually just above 1")


def _check_images(model, labels, seeds) -> tuple[Tensor, list[int]]:
    labels = torch.as_tensor(labels)
    if labels.ndim != 1 or len(labels) == 0 or labels.is_floating_point():
        raise ValueError(f"labels of shape {tuple(labels.shape)}, {labels.dtype}: expected (N,) integers, N at least 1")
    if labels.min() < 0 or labels.max() >= model.num_classes:
        raise ValueError(f"labels run from {labels.min()} to {labels.max()}, expected 0 to {model.num_classes - 1}; "
                         "for the unconditional model use Guidance(scale=0)")
    seeds = [int(seed) for seed in seeds]
    if len(seeds) != len(labels):
        raise ValueError(f"{len(seeds)} seeds for {len(labels)} labels: each image has its own seed")
    return labels.long(), seeds
