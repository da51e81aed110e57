"""One training step taken apart: each quantity has a name, and each operation can be exchanged for a broken one."""
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dit_repro.diffusion import Losses, NoiseSchedule, training_losses
from dit_repro.training.precision import autocast, matmul_precision
from dit_repro.training.state import TrainState


def to_pixels(images: Tensor) -> Tensor:
    return images / 127.5 - 1   # uint8 values as floats -> [-1, 1]


def encode(autoencoder: nn.Module, pixels: Tensor) -> Tensor:
    """Moments (N, 2C, h, w) from an AutoencoderKL in eval mode."""
    posterior = autoencoder.encode(pixels).latent_dist
    return torch.cat([posterior.mean, posterior.logvar], 1)


def sample_latents(moments: Tensor, latent_noise: Tensor, scale_factor: float) -> Tensor:
    mean, logvar = moments.chunk(2, 1)
    return (mean + (logvar / 2).exp() * latent_noise) * scale_factor   # (N, C, h, w)


def drop_labels(labels: Tensor, dropped: Tensor, num_classes: int) -> Tensor:
    return labels.masked_fill(dropped, num_classes)


def look_up(schedule: NoiseSchedule, t: Tensor) -> tuple[Tensor, Tensor]:
    """Coefficients of latents and of noise in x_t, (N,) float64 each."""
    a = schedule.alphas_cumprod.to(t.device)
    return a.sqrt()[t], (1 - a).sqrt()[t]


def add_noise(x0: Tensor, noise: Tensor, signal: Tensor, sigma: Tensor) -> Tensor:
    return signal.view(-1, 1, 1, 1) * x0 + sigma.view(-1, 1, 1, 1) * noise


def noise_target(x0: Tensor, noise: Tensor, signal: Tensor, sigma: Tensor) -> Tensor:
    return noise


def predict(model: nn.Module, x_t: Tensor, t: Tensor, y: Tensor) -> Tensor:
    return model(x_t, t, y)   # (N, C or 2C, H, W)


def keep_output(output: Tensor) -> Tensor:
    return output   # noise first, variance second


def losses_of(output: Tensor, x0: Tensor, t: Tensor, y: Tensor, schedule, objective, target, input_noise) -> Losses:
    """The package's own objective, for an output that is there already."""
    return training_losses(lambda *inputs: output, x0, t, y, schedule, objective, noise=target, input_noise=input_noise)


def share_of_mean(total: Tensor, global_batch_size: int) -> Tensor:
    """What a micro-batch adds to the mean over the whole batch."""
    return total.sum() / global_batch_size


def keep_gradients(gradients: list[Tensor]) -> None:
    """Unscaled already: nothing to do."""


def clip(gradients: list[Tensor], clip_norm: float) -> None:
    norm = torch.stack(torch._foreach_norm(gradients)).square().sum().sqrt()
    torch._foreach_mul_(gradients, (clip_norm / (norm + 1e-6)).clamp(max=1.0))


def optimize(state: TrainState) -> None:
    state.scaler.step(state.optimizer)
    state.scaler.update()


def average(state: TrainState, before: list[Tensor]) -> None:
    """`before`: the weights that the step started from, which a correct average does not need."""
    state.ema.update(state.model, state.step + 1)


@dataclass(frozen=True)
class Stages:
    """The operations of a step. The defaults are right; `faults.py` exchanges them one at a time."""
    pixels: Callable = to_pixels
    encode: Callable = encode
    latents: Callable = sample_latents
    labels: Callable = drop_labels
    coefficients: Callable = look_up
    noisy: Callable = add_noise
    target: Callable = noise_target
    predict: Callable = predict
    prediction: Callable = keep_output
    losses: Callable = losses_of
    reduce: Callable = share_of_mean
    gradients: Callable = keep_gradients
    clip: Callable = clip
    optimize: Callable = optimize
    average: Callable = average


CORRECT = Stages()


class _Anchor(torch.autograd.Function):
    """A recorded value in place of a computed one; the gradient flows as if it had been computed."""

    @staticmethod
    def forward(ctx, value, recorded):
        return recorded.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Recorder:
    """Keeps every quantity of a step by name. With `anchor`, a recorded step, each quantity is computed from the
    recorded ones before it, so that a broken one does not hide whether those after it are right."""

    def __init__(self, anchor: dict[str, Tensor] | None = None):
        self.anchor = anchor or {}
        self.parts = {}

    def __call__(self, name: str, value: Tensor, rows: slice = slice(None)) -> Tensor:
        self.parts.setdefault(name, []).append(value.detach().clone())
        if name not in self.anchor:
            return value
        recorded = self.anchor[name][rows].to(value.device, value.dtype)
        return _Anchor.apply(value, recorded) if value.requires_grad else recorded

    def group(self, name: str, named: dict[str, Tensor]) -> None:
        """Tensors of every parameter; with an anchor they take on the recorded values in place."""
        for parameter, value in named.items():
            value.copy_(self(f"{name}.{parameter}", value))

    def tensors(self) -> dict[str, Tensor]:
        return {name: (torch.cat(parts) if len(parts) > 1 else parts[0]).cpu() for name, parts in self.parts.items()}


@contextmanager
def _traced(model: nn.Module, keep: Recorder, rows: slice):
    """Record what each part of the model gives: its direct children, and each block of a list of blocks."""
    handles = []
    for name, module in model.named_children():
        inner = module.named_children() if isinstance(module, nn.ModuleList) else [("", module)]
        for number, part in inner:
            label = f"activation.{name}.{number}".rstrip(".")
            handles.append(part.register_forward_hook(
                lambda module, inputs, output, label=label: keep(label, output, rows)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def take_step(config, state: TrainState, batch: dict[str, Tensor], scale_factor: float, stages: Stages = CORRECT,
              anchor: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The step that a Trainer would take on `batch`, bit for bit, and every quantity of it by name, on the CPU.

    batch: moments (N, 2C, h, w), latent_noise, noise and input_noise (N, C, h, w), t and labels (N,) int64, dropped
    (N,) bool. The arithmetic is in the dtype of the model's weights, with autocast as config.precision says.
    """
    keep = Recorder(anchor)
    weights = list(state.trained.values())
    device, dtype = weights[0].device, weights[0].dtype
    batch = {name: tensor.to(device, dtype if tensor.is_floating_point() else None) for name, tensor in batch.items()}
    schedule = config.noise_schedule()
    t = batch["t"]
    moments = keep("moments", batch["moments"])
    x0 = keep("latents", stages.latents(moments, batch["latent_noise"], scale_factor))
    y = keep("labels", stages.labels(batch["labels"], batch["dropped"], config.num_classes))
    signal, sigma = (keep(f"coefficient.{name}", value.to(dtype)) for name, value in
                     zip(("signal", "sigma"), stages.coefficients(schedule, t)))   # (N,)
    x_t = keep("x_t", stages.noisy(x0, batch["input_noise"], signal, sigma))
    target = keep("target", stages.target(x0, batch["noise"], signal, sigma))
    with matmul_precision(config.precision):
        for start in range(0, len(t), config.micro_batch_size or len(t)):
            rows = slice(start, start + (config.micro_batch_size or len(t)))
            with _traced(state.model, keep, rows), autocast(config.precision, device):
                output = stages.predict(state.model, x_t[rows], schedule.model_timesteps(t[rows]), y[rows])
            output = keep("output", output, rows)
            handed = keep("prediction", stages.prediction(output), rows)
            losses = stages.losses(handed, x0[rows], t[rows], y[rows], schedule, config.objective, target[rows],
                                   batch["input_noise"][rows])
            terms = [keep(f"loss.{name}", term, rows) for name, term in zip(Losses._fields, losses)]
            state.scaler.scale(stages.reduce(terms[-1], len(t))).backward()
        _update(config, state, stages, keep)
    return keep.tensors()


@torch.no_grad()
def _update(config, state: TrainState, stages: Stages, keep: Recorder) -> None:
    """From gradients to averaged weights, each as a Trainer does it."""
    state.scaler.unscale_(state.optimizer)
    gradients = {name: weight.grad for name, weight in state.trained.items()}
    stages.gradients([*gradients.values()])
    keep.group("gradient", gradients)
    if config.clip_norm:
        stages.clip([*gradients.values()], config.clip_norm)
        keep.group("clipped", gradients)
    before = {name: weight.clone() for name, weight in state.trained.items()}
    averages = {name: tensor.clone() for name, tensor in state.ema.tensors.items()}
    stages.optimize(state)
    for slot in ("exp_avg", "exp_avg_sq"):
        for name, weight in state.trained.items():   # none where fp16 skipped its first steps
            keep(f"moment.{slot}.{name}", state.optimizer.state[weight].get(slot, torch.zeros_like(weight)))
    for name, weight in state.trained.items():
        update = keep(f"update.{name}", weight - before[name])
        if keep.anchor:   # not otherwise: before + (after - before) need not be after
            weight.copy_(before[name] + update)
    state.optimizer.zero_grad()
    stages.average(state, [*before.values()])
    for name in state.trained:
        keep(f"ema.{name}", state.ema.tensors[name] - averages[name])
    state.step += 1
