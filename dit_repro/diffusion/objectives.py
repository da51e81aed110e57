"""What a diffusion model is trained on: noise error, learned-variance bound, and their declared variants."""
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dit_repro.progress import progress

from .schedule import VARIANCES, NoiseSchedule


@dataclass(frozen=True)
class Objective:
    """The training objective. The defaults are the paper's; every other value is a declared departure."""
    learn_sigma: bool = True            # the model predicts noise and variance, 2C channels
    # Improved DDPM adds 0.001 of the *sum* of the bound over T = 1000 timesteps. A sampled timestep estimates the mean,
    # so the weight beside the mean-squared error is 0.001 * 1000 = 1, and 0.001 here would be wrong by 1000.
    vb_weight: float = 1.0
    detach_mean: bool = True            # the bound trains the variance alone
    min_snr_gamma: float | None = None  # weight the noise error by min(snr, gamma) / snr (arXiv 2303.09556); 5 is usual
    noise_offset: float = 0.0           # one shared normal value per image and channel, times this, added to the noise
    input_perturbation: float = 0.0     # extra noise in the input, not in the target (arXiv 2301.11706); 0.1 is usual

    def __post_init__(self):
        for name in ("vb_weight", "noise_offset", "input_perturbation"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"objective: {name}={getattr(self, name)}, expected a number of at least 0")
        if self.min_snr_gamma is not None and not self.min_snr_gamma > 0:
            raise ValueError(f"objective: min_snr_gamma={self.min_snr_gamma}, expected a number above 0, or None")

    def draw_noise(self, shape, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Target noise and input noise, `shape` (..., C, H, W), on the generator's device.

        They are one tensor without input perturbation. The plain noise is drawn first, so every objective shares it.
        """
        def draw(*size):
            return torch.randn(size, generator=generator, device=generator.device)

        noise = draw(*shape)
        if self.noise_offset:
            noise = noise + self.noise_offset * draw(*shape[:-2], 1, 1)
        if self.input_perturbation:
            return noise, noise + self.input_perturbation * draw(*shape)
        return noise, noise


class Losses(NamedTuple):
    """Per-sample terms, each (N,): total = weight * mse + vb_weight * vb. Train on total.mean()."""
    mse: Tensor     # mean over dimensions of the squared error of the noise
    vb: Tensor      # term of the variational bound at this timestep, bits per dimension; zero without learned variance
    weight: Tensor  # of mse; 1 without min-SNR
    total: Tensor


def training_losses(model: nn.Module, x0: Tensor, t: Tensor, y: Tensor, schedule: NoiseSchedule, objective: Objective,
                    *, noise: Tensor, input_noise: Tensor | None = None) -> Losses:
    """The paper's hybrid loss (section 3.1): noise MSE for the mean, variational bound for the variance alone.

    x0, noise: (N, C, H, W); t, y: (N,) int64, t an index into `schedule`. `input_noise` is what x_t is made with, where
    it differs from the target. Raises ValueError where the model's output channels do not fit the objective.
    """
    if objective.input_perturbation and input_noise is None:
        raise ValueError(f"objective has input_perturbation={objective.input_perturbation}: pass the input_noise that "
                         "objective.draw_noise returned")
    x_t = schedule.add_noise(x0, t, noise if input_noise is None else input_noise)  # (N, C, H, W)
    eps, values = _predict(model, x_t, t, y, schedule, objective.learn_sigma)
    mse = (eps - noise).square().flatten(1).mean(1)  # (N,)
    vb = torch.zeros_like(mse)
    if objective.learn_sigma:
        mean_eps = eps.detach() if objective.detach_mean else eps
        vb = _bound_term(schedule, "learned", x0, x_t, t, mean_eps, values)
    weight = torch.ones_like(mse)
    if objective.min_snr_gamma is not None:
        snr = schedule.snr(t).to(mse.dtype)
        weight = snr.clamp(max=objective.min_snr_gamma) / snr
    return Losses(mse, vb, weight, weight * mse + objective.vb_weight * vb)


def loss_of_unit_gaussian(schedule: NoiseSchedule) -> Tensor:
    """Noise MSE, by timestep, of the best predictor that takes the latents for independent standard normals.

    Returns (T,) float64. x_t then has unit variance at every t and the best guess is sqrt(1 - a) x_t, which leaves
    the error a = alphas_cumprod. Its mean is 0.2755 for the linear schedule: a model above it knows nothing of images.
    """
    return schedule.alphas_cumprod


def loss_of_gaussian(schedule: NoiseSchedule, covariance: Tensor) -> Tensor:
    """Noise MSE, by timestep, of the best predictor that knows nothing but the latents' mean and covariance.

    covariance: (D, D) of the flattened latents. Returns (T,) float64. Along an eigenvector of variance v the best
    linear guess (a Wiener filter) leaves a v / (a v + 1 - a); with v = 1 throughout this is `loss_of_unit_gaussian`.
    """
    variances = torch.linalg.eigvalsh(covariance.double()).clamp(min=0)  # (D,)
    a = schedule.alphas_cumprod[:, None]  # (T, 1)
    return (a * variances / (a * variances + 1 - a)).mean(1)


class Bound(NamedTuple):
    """Variational bound on the negative log likelihood, bits per dimension."""
    terms: Tensor  # (N, T): index 0 is the likelihood of 8-bit bins, the others are divergences of the reverse steps
    prior: Tensor  # (N,): divergence of x_T from a standard normal; no model can change it

    @property
    def total(self) -> Tensor:
        """(N,): the bound itself."""
        return self.terms.sum(1) + self.prior


@torch.no_grad()
def variational_bound(model: nn.Module, x0: Tensor, y: Tensor, schedule: NoiseSchedule, generator: torch.Generator,
                      variance: str = "learned") -> Bound:
    """Every term of the bound for x0 (N, C, H, W) with labels y (N,), one noise draw a term (DDPM, equation 5).

    Costs T forward passes of N. A respaced schedule gives the bound of the shorter chain, which is looser.
    `variance` is that of the reverse steps: "learned", "fixed_small" or "fixed_large".
    """
    if variance not in VARIANCES:
        raise ValueError(f"variance={variance!r}: expected one of {', '.join(VARIANCES)}")
    terms = []
    for step in progress(range(schedule.num_steps), desc="bound", unit="step"):
        t = torch.full((len(x0),), step, device=x0.device)
        noise = torch.randn(x0.shape, generator=generator, device=generator.device).to(x0.device)
        x_t = schedule.add_noise(x0, t, noise)
        eps, values = _predict(model, x_t, t, y, schedule, variance == "learned")
        terms.append(_bound_term(schedule, variance, x0, x_t, t, eps, values))
    a = float(schedule.alphas_cumprod[-1])
    prior = 0.5 * (a * x0.square() - a - math.log1p(-a))  # KL(N(sqrt(a) x0, 1 - a) || N(0, 1)), in nats
    return Bound(torch.stack(terms, 1), prior.flatten(1).mean(1) / math.log(2))


def _predict(model, x_t, t, y, schedule, learn_sigma) -> tuple[Tensor, Tensor]:
    """Noise and variance values, (N, C, H, W) each; without learned variance the second is the first, a placeholder."""
    output = model(x_t, schedule.model_timesteps(t), y)
    output = output.to(torch.promote_types(output.dtype, torch.float32))  # half precision ends at the model
    channels = x_t.shape[1]
    expected = 2 * channels if learn_sigma else channels
    if output.shape[1] != expected:
        kind = "learned" if learn_sigma else "fixed"
        raise ValueError(f"the model has {output.shape[1]} output channels, expected {expected} for latents of "
                         f"{channels}: {kind} variance needs a model with learn_sigma={learn_sigma}")
    return (*output.split(channels, 1),) if learn_sigma else (output, output)


def _bound_term(schedule, variance, x0, x_t, t, eps, values) -> Tensor:
    """One term of the bound in bits per dimension, (N,): KL(q(x_{t-1}|x_t,x0) || p(x_{t-1}|x_t)), or -log p(x0|x_1)."""
    true_mean, _, true_log_variance = schedule.posterior(x0, x_t, t)
    mean, _, _ = schedule.posterior(schedule.predict_x0(x_t, t, eps), x_t, t)
    log_variance = schedule.log_variance(variance, t, values)
    divergence = 0.5 * (log_variance - true_log_variance - 1 + (true_log_variance - log_variance).exp()
                        + (true_mean - mean).square() * (-log_variance).exp())
    likelihood = _negative_log_likelihood(x0, mean, log_variance)
    first = (t == 0).view(-1, *[1] * (x0.ndim - 1))
    return torch.where(first, likelihood, divergence).flatten(1).mean(1) / math.log(2)


def _negative_log_likelihood(x0: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    """-log probability, in nats, of the 8-bit bin around each value; the outer bins of [-1, 1] are open.

    The official code uses the likelihood of pixels on latents, which do leave [-1, 1]. Kept: it is one step in 1,000.
    """
    inverse_std = (-0.5 * log_variance).exp()

    def cumulative(edge):
        z = (edge - mean) * inverse_std  # then the tanh form of the normal distribution function, as the official code
        return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))

    upper = torch.where(x0 > 0.999, 1.0, cumulative(x0 + 1 / 255))
    lower = torch.where(x0 < -0.999, 0.0, cumulative(x0 - 1 / 255))
    return -(upper - lower).clamp(min=1e-12).log()
