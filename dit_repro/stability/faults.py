"""Faults that training code is known to have, each planted into a correct step by exchanging one operation."""
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import nn

from dit_repro.stability.step import CORRECT, Stages, encode, losses_of, optimize, predict, sample_latents

LOSS_SCALE = 1024   # of the faults that forget it: a power of two, so that scaling itself rounds nothing


@dataclass(frozen=True)
class Fault:
    """One defect: the `stage` at which it first shows, the operations it exchanges, and settings that it needs.

    `needs_images`: it happens before latents exist, so it shows only where the images are at hand. `below_bf16`: it
    changes less than bf16's own rounding, which hides it.
    """
    stage: str
    changes: dict[str, Callable]
    settings: dict = field(default_factory=dict)
    needs_images: bool = False
    below_bf16: bool = False


def _dropout_encoder(autoencoder, pixels):
    """An autoencoder left in train mode whose config has dropout."""
    hook = autoencoder.encoder.conv_in.register_forward_hook(lambda module, inputs, output: F.dropout(output, 0.1))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            return encode(autoencoder, pixels)
        finally:
            hook.remove()


def _mean_of_moments(moments, latent_noise, scale_factor):
    return moments.chunk(2, 1)[0] * scale_factor


def _damaged_sample(moments, latent_noise, scale_factor):
    latents = sample_latents(moments, latent_noise, scale_factor).clone()
    latents[len(latents) // 2, 0, 0, 0] = torch.nan
    return latents


def _null_off_by_one(labels, dropped, num_classes):
    return labels.masked_fill(dropped, num_classes - 1)


def _other_tables(schedule, t):
    other = "cosine" if schedule.name == "linear" else "linear"
    a = getattr(type(schedule), other)(schedule.num_steps).alphas_cumprod.to(t.device)
    return a.sqrt()[t], (1 - a).sqrt()[t]


def _next_timestep(schedule, t):
    a = schedule.alphas_cumprod.to(t.device)
    later = (t + 1).clamp(max=schedule.num_steps - 1)
    return a.sqrt()[later], (1 - a).sqrt()[later]


def _first_of_batch(x0, noise, signal, sigma):
    """Coefficients of the first image for all of them."""
    return signal[0] * x0 + sigma[0] * noise


def _velocity(x0, noise, signal, sigma):
    return signal.view(-1, 1, 1, 1) * noise - sigma.view(-1, 1, 1, 1) * x0


def _fresh_noise(x0, noise, signal, sigma):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(noise.shape, generator=generator).to(noise)


def _halves_swapped(output):
    return output.roll(output.shape[1] // 2, 1)


@contextmanager
def _exchanged(owner: nn.Module, name: str, module: nn.Module):
    kept = getattr(owner, name)
    setattr(owner, name, module)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def _bf16_timesteps(model, x_t, t, y):
    hook = model.t_embedder.register_forward_pre_hook(lambda module, inputs: (inputs[0].bfloat16().float(),))
    try:
        return predict(model, x_t, t, y)
    finally:
        hook.remove()


def _missing_norm(model, x_t, t, y):
    with _exchanged(model.blocks[len(model.blocks) // 2], "norm2", nn.Identity()):
        return predict(model, x_t, t, y)


def _exact_gelu(model, x_t, t, y):
    with _exchanged(model.blocks[-1].mlp, "act", nn.GELU()):
        return predict(model, x_t, t, y)


def _summed_features(output, x0, *rest):
    losses = losses_of(output, x0, *rest)
    mse = losses.mse * x0[0].numel()
    return losses._replace(mse=mse, total=mse + losses.vb)


def _bound_weighted_twice(*inputs):
    """The 0.001 of the literature beside a sampled timestep, where 0.001 x 1000 = 1 belongs."""
    losses = losses_of(*inputs)
    return losses._replace(total=losses.weight * losses.mse + 0.001 * losses.vb)


def _not_divided(total, global_batch_size):
    return total.mean()


def _still_scaled(gradients):
    torch._foreach_mul_(gradients, LOSS_SCALE)


def _clip_scaled(gradients, clip_norm):
    _still_scaled(gradients)
    CORRECT.clip(gradients, clip_norm)
    torch._foreach_div_(gradients, LOSS_SCALE)


def _optimize_with(**changed):
    def step(state):
        group = state.optimizer.param_groups[0]
        kept = {name: group[name] for name in changed}
        group.update(changed)
        optimize(state)
        group.update(kept)
    return step


def _decay_undeclared(state):
    optimize(state)
    torch._foreach_mul_([*state.trained.values()], 1 - 0.1 * state.optimizer.param_groups[0]["lr"])


def _stale_average(state, before):
    weights = [*state.trained.values()]
    after = [weight.clone() for weight in weights]
    torch._foreach_copy_(weights, before)
    CORRECT.average(state, before)
    torch._foreach_copy_(weights, after)


FAULTS = {
    "images in [0, 1]": Fault("data range", {"pixels": lambda images: images / 255}, needs_images=True),
    "red and blue swapped": Fault("channel order", {"pixels": lambda images: (images / 127.5 - 1).flip(1)},
                                  needs_images=True),
    "autoencoder with dropout on": Fault("encoder", {"encode": _dropout_encoder}, needs_images=True),
    "scale factor missing": Fault("latent scale", {"latents": lambda m, noise, scale: sample_latents(m, noise, 1.0)}),
    "scale factor twice": Fault("latent scale", {"latents": lambda m, noise, s: sample_latents(m, noise, s * s)}),
    "mean instead of a sample": Fault("latent sample", {"latents": _mean_of_moments}),
    "NaN in one sample": Fault("latent sample", {"latents": _damaged_sample}),
    "null label off by one": Fault("labels", {"labels": _null_off_by_one}, {"label_dropout": 0.5}),
    "cosine for linear tables": Fault("coefficients", {"coefficients": _other_tables}),
    "coefficients of t + 1": Fault("coefficients", {"coefficients": _next_timestep}),
    "one coefficient for the batch": Fault("broadcast", {"noisy": _first_of_batch}),
    "velocity target": Fault("target", {"target": _velocity}),
    "fresh noise as target": Fault("target", {"target": _fresh_noise}),
    "variance read as noise": Fault("prediction type", {"prediction": _halves_swapped}),
    "bf16 timesteps": Fault("activation t_embedder", {"predict": _bf16_timesteps}),
    "a norm left out of a block": Fault("activation blocks", {"predict": _missing_norm}),
    "exact GELU in the last block": Fault("activation blocks", {"predict": _exact_gelu}, below_bf16=True),
    "features summed": Fault("raw loss", {"losses": _summed_features}),
    "bound times 0.001": Fault("weighted loss", {"losses": _bound_weighted_twice}),
    "accumulated loss not divided": Fault("gradients", {"reduce": _not_divided}, {"micro_batch_size": 4}),
    "loss scale not undone": Fault("gradients", {"gradients": _still_scaled}),
    "clip before unscale": Fault("clipping", {"clip": _clip_scaled}, {"clip_norm": 0.1}),
    "beta2 0.95": Fault("moments", {"optimize": _optimize_with(betas=(0.9, 0.95))}),
    "weight decay undeclared": Fault("update", {"optimize": _decay_undeclared}),
    "epsilon 1e-3": Fault("update", {"optimize": _optimize_with(eps=1e-3)}),
    "stale average": Fault("EMA", {"average": _stale_average}),
}


def plant(name: str) -> tuple[Stages, dict]:
    """The operations of a step with one fault, and the settings that it needs; ValueError lists the names."""
    if name not in FAULTS:
        raise ValueError(f"unknown fault {name!r}; the faults are {', '.join(FAULTS)}")
    return replace(CORRECT, **FAULTS[name].changes), FAULTS[name].settings
