"""Against diffusers' schedulers, from the same noise, and against what is known exactly for normal data."""
import logging
import math

import diffusers
import numpy as np
import pytest
import torch
from torch import nn

from dit_repro.diffusion import NoiseSchedule
from dit_repro.sampling import clamp_x0, dynamic_threshold, sample, sample_states

LINEAR, COSINE = NoiseSchedule.linear(1000), NoiseSchedule.cosine(1000)
SEEDS = [3, 14, 15]


class Curved(nn.Module):
    """Some nonlinear function of the state, the timestep and the label, with a variance output beyond [-1, 1]."""
    in_channels, input_size, num_classes, learn_sigma = 4, 4, 10, True

    def forward(self, x, t, y):
        condition = (y / 10 + t / 1000).view(-1, 1, 1, 1)
        return torch.cat([0.9 * torch.sin(x + condition), 1.3 * torch.cos(x - condition)], 1)


class GaussianDenoiser(nn.Module):
    """The exact model of N(mean, std^2) data, for whole and fractional original timesteps of a schedule.

    With `reverse`, the respaced schedule it will be sampled with, its variance output is exact too.
    """
    in_channels, input_size, num_classes = 4, 8, 10

    def __init__(self, schedule, mean=0.5, std=0.7, reverse=None):
        super().__init__()
        self.sigmas = ((1 - schedule.alphas_cumprod) / schedule.alphas_cumprod).sqrt().numpy()
        self.mean, self.std, self.reverse, self.learn_sigma = mean, std, reverse, reverse is not None

    def forward(self, x, t, y):
        a = 1 / (1 + np.interp(float(t[0]), np.arange(1000), self.sigmas) ** 2)
        total = a * self.std**2 + 1 - a
        eps = math.sqrt(1 - a) / total * (x - math.sqrt(a) * self.mean)
        if self.reverse is None:
            return eps
        index = self.reverse.timesteps.tolist().index(int(t[0]))
        before = 1.0 if index == 0 else self.reverse.alphas_cumprod[index - 1].item()
        beta = self.reverse.betas[index].item()
        variance = beta * (1 - before) / (1 - a) + before * beta**2 / (1 - a) * self.std**2 / total
        at = torch.full((1,), index)
        low, high = (self.reverse.log_variance("learned", at, torch.full((1, 1), v).double()) for v in (-1.0, 1.0))
        value = 2 * (math.log(variance) - low) / (high - low) - 1
        return torch.cat([eps, value.float().view(1, 1, 1, 1).expand_as(x)], 1)


def generators():
    """Each seed's generator after its first draw, the start."""
    drawn = [torch.Generator().manual_seed(seed) for seed in SEEDS]
    for generator in drawn:
        torch.randn(4, 4, 4, generator=generator)
    return drawn


def assert_same_steps(states, scheduler, channels, **settings):
    """Give the peer each of our states in turn; it must make the same next one from the same noise.

    Its table is put in float64 first: in float32 it alone is off by up to 4e-6 of the state.
    """
    scheduler.alphas_cumprod = torch.cumprod(1 - torch.linspace(1e-4, 2e-2, 1000, dtype=torch.float64), 0)
    model, labels = Curved(), torch.tensor([0, 5, 9])
    draws = generators()
    count = 0
    for state in states:
        output = model(state.x_t, torch.full((3,), state.timestep), labels)[:, :channels]
        peer = scheduler.step(output, state.timestep, state.x_t, generator=draws, **settings)
        scale = state.sample.abs().max().clamp(min=1)
        torch.testing.assert_close(state.sample / scale, peer.prev_sample / scale, rtol=0, atol=1e-6)
        count += 1
    assert count == len(scheduler.timesteps)


@pytest.mark.parametrize("variance, name, channels", [
    ("learned", "learned_range", 8), ("fixed_small", "fixed_small", 4), ("fixed_large", "fixed_large", 4)])
@pytest.mark.parametrize("steps, transform", [("250", None), ("20", "clamp"), ("20", "dynamic")])
def test_ddpm_steps_agree_with_diffusers(variance, name, channels, steps, transform):
    clip = {None: {"clip_sample": False}, "clamp": {"clip_sample": True, "clip_sample_range": 2.0},
            "dynamic": {"clip_sample": False, "thresholding": True, "dynamic_thresholding_ratio": 0.9,
                        "sample_max_value": 1e9}}[transform]
    ours = {None: None, "clamp": clamp_x0(2.0), "dynamic": dynamic_threshold(90.0, 1.0)}[transform]
    scheduler = diffusers.DDPMScheduler(1000, beta_schedule="linear", variance_type=name, **clip)
    scheduler.set_timesteps(timesteps=LINEAR.respaced(steps).timesteps.flip(0).tolist())
    states = sample_states(Curved(), [0, 5, 9], LINEAR, steps, seeds=SEEDS, variance=variance, x0_transform=ours)
    assert_same_steps(states, scheduler, channels)


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("limit", [None, 2.0])
def test_ddim_steps_agree_with_diffusers(eta, limit):
    scheduler = diffusers.DDIMScheduler(1000, beta_schedule="linear",
                                        clip_sample=limit is not None, clip_sample_range=limit or 1.0)
    scheduler.set_timesteps(50)
    states = sample_states(Curved(), [0, 5, 9], LINEAR, "ddim50", seeds=SEEDS, method="ddim", eta=eta,
                           x0_transform=clamp_x0(limit) if limit else None)
    assert_same_steps(states, scheduler, 4, eta=eta, use_clipped_model_output=True)


def test_bridge_to_ddpm_and_ddim_gives_what_our_own_loops_give():
    draw = {"labels": [0, 5, 9], "schedule": LINEAR, "seeds": SEEDS}
    ours = sample(Curved(), steps="ddim20", variance="fixed_small", **draw)
    bridged = sample(Curved(), steps=20, method=diffusers.DDPMScheduler, **draw)
    torch.testing.assert_close(bridged, ours, rtol=1e-4, atol=1e-5)
    ours = sample(Curved(), steps="ddim20", method="ddim", **draw)
    bridged = sample(Curved(), steps="20", method=diffusers.DDIMScheduler, **draw)
    torch.testing.assert_close(bridged, ours, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name, schedule", [
    ("DPMSolverMultistepScheduler", LINEAR), ("DPMSolverMultistepScheduler", COSINE),
    ("UniPCMultistepScheduler", LINEAR), ("UniPCMultistepScheduler", COSINE),
    ("HeunDiscreteScheduler", LINEAR),  # from the cosine schedule's sigma of 20,000 its first step alone is far off
])
def test_second_order_solvers_land_nearer_the_exact_flow_than_ddim(schedule, name):
    """For normal data the deterministic flow is linear: it keeps the number of deviations from the mean."""
    model, seeds = GaussianDenoiser(schedule), [0, 1]
    start = torch.stack([torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
    a = schedule.alphas_cumprod[-1].item()
    exact = 0.5 + 0.7 * (start - math.sqrt(a) * 0.5) / math.sqrt(a * 0.49 + 1 - a)
    bridged = sample(model, [0, 0], schedule, 25, seeds=seeds, method=getattr(diffusers, name))
    ddim = sample(model, [0, 0], schedule, 25, seeds=seeds, method="ddim")
    assert (bridged - exact).square().mean().sqrt() < 0.5 * (ddim - exact).square().mean().sqrt()
    assert (bridged - exact).abs().max() < 0.05


def test_bridge_keeps_the_settings_of_an_instance_but_not_its_betas_nor_its_clamp():
    instance = diffusers.DPMSolverMultistepScheduler(50, beta_schedule="scaled_linear", solver_order=3)
    draw = {"labels": [0, 5, 9], "schedule": COSINE, "steps": 10, "seeds": SEEDS}
    third = sample(Curved(), method=instance, **draw)
    assert not torch.allclose(third, sample(Curved(), method=diffusers.DPMSolverMultistepScheduler, **draw))
    fresh = diffusers.DPMSolverMultistepScheduler(trained_betas=COSINE.betas.tolist(), solver_order=3)
    torch.testing.assert_close(third, sample(Curved(), method=fresh, **draw))
    wide = sample(Curved(), method=diffusers.DDIMScheduler(clip_sample=True), **draw)
    ours = sample(Curved(), **{**draw, "steps": "ddim10"}, method="ddim")
    torch.testing.assert_close(wide, ours, rtol=1e-4, atol=1e-5)


def test_bridge_uses_what_every_scheduler_expects_without_warnings(caplog):
    logging.getLogger("diffusers").addHandler(caplog.handler)
    for name in ("DPMSolverMultistepScheduler", "UniPCMultistepScheduler", "HeunDiscreteScheduler", "DDIMScheduler"):
        for method in (getattr(diffusers, name), getattr(diffusers, name)()):
            sample(Curved(), [0], LINEAR, 4, seeds=[0], method=method)
    logging.getLogger("diffusers").removeHandler(caplog.handler)
    assert not caplog.records


def test_clamped_x0_reaches_the_solver_of_the_bridge():
    """DDIM by the bridge with our clamp is our DDIM with our clamp."""
    draw = {"labels": [0, 5, 9], "schedule": LINEAR, "seeds": SEEDS, "x0_transform": clamp_x0(1.5)}
    torch.testing.assert_close(sample(Curved(), steps=20, method=diffusers.DDIMScheduler, **draw),
                               sample(Curved(), steps="ddim20", method="ddim", **draw), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method, settings, message", [
    (diffusers.FlowMatchEulerDiscreteScheduler, {}, "trained_betas"),
    (diffusers.KDPM2DiscreteScheduler, {}, "noise levels"),
    (diffusers.DDPMScheduler(variance_type="learned_range"), {}, "learned variance"),
    (diffusers.DDIMScheduler, {"steps": "ddim10"}, "count from 1 to 1000"),
    (diffusers.DDIMScheduler, {"steps": 0}, "count from 1 to 1000"),
    (diffusers.DDIMScheduler, {"schedule": LINEAR.respaced(50)}, "full schedule"),
    (diffusers.DDIMScheduler, {"eta": 0.3}, "only method"),
])
def test_bridge_refuses_what_it_cannot_do_right(method, settings, message):
    with pytest.raises(ValueError, match=message):
        sample(Curved(), [0], **{"schedule": LINEAR, "steps": 10, **settings}, seeds=[0], method=method)


def deviation(**settings):
    """Mean and standard deviation over 32 images of 256 values, of data with mean 0.5 and deviation 0.7."""
    latents = sample(labels=[0] * 32, seeds=range(32), **settings)
    return latents.mean().item(), latents.std().item()


@pytest.mark.parametrize("schedule", [LINEAR, COSINE], ids=["linear", "cosine"])
@pytest.mark.parametrize("steps", [4, 10])
def test_exact_learned_variance_recovers_normal_data_in_few_steps(schedule, steps):
    """Standard errors: 0.008 and 0.0055. The last step adds no noise, and loses what is left of the variance."""
    model = GaussianDenoiser(schedule, reverse=schedule.respaced(steps))
    mean, std = deviation(model=model, schedule=schedule, steps=steps)
    assert mean == pytest.approx(0.5, abs=0.03) and std == pytest.approx(0.7, abs=0.02)


def test_fixed_variances_bracket_the_data_and_converge_to_them():
    model, error = GaussianDenoiser(LINEAR), {}
    for variance in ("fixed_small", "fixed_large"):
        for steps in (5, 200):
            mean, std = deviation(model=model, schedule=LINEAR, steps=steps, variance=variance)
            error[variance, steps] = std - 0.7
            assert mean == pytest.approx(0.5, abs=0.05)
    assert error["fixed_small", 5] < -0.05 and error["fixed_large", 5] > 0.05
    assert abs(error["fixed_small", 200]) < 0.02 and abs(error["fixed_large", 200]) < 0.02


def test_ddim_converges_to_the_exact_flow_at_first_order():
    model, seed = GaussianDenoiser(LINEAR), 0
    start = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(seed))
    a = LINEAR.alphas_cumprod[-1].item()
    exact = 0.5 + 0.7 * (start - math.sqrt(a) * 0.5) / math.sqrt(a * 0.49 + 1 - a)
    errors = [(sample(model, [0], LINEAR, steps, seeds=[seed], method="ddim")[0] - exact).abs().max().item()
              for steps in (10, 100, 1000)]
    assert errors[0] > 4 * errors[1] > 16 * errors[2] and errors[2] < 0.01


def test_ddim_at_eta_one_spreads_as_ddpm_with_the_small_variance():
    model = GaussianDenoiser(LINEAR)
    ddim = deviation(model=model, schedule=LINEAR, steps=20, method="ddim", eta=1.0)
    ddpm = deviation(model=model, schedule=LINEAR, steps=20, variance="fixed_small")
    assert ddim == pytest.approx(ddpm, abs=1e-4)
