import itertools
import math

import diffusers
import numpy as np
import pytest
import torch
from torch import nn

from dit_repro.diffusion import NoiseSchedule
from dit_repro.sampling import clamp_x0, sample, sample_states, trace
from dit_repro.sampling.exposure import NOISE_LIMIT

LINEAR, COSINE = NoiseSchedule.linear(1000), NoiseSchedule.cosine(1000)
N, LIMIT = 128, 8.0
GENERATOR = torch.Generator().manual_seed(0)
MEAN, STD = torch.linspace(-1, 1, 256).view(4, 8, 8), torch.linspace(0.3, 1.2, 256).flip(0).view(4, 8, 8)
REAL = MEAN + STD * torch.randn(4000, 4, 8, 8, generator=GENERATOR)


class Denoiser(nn.Module):
    """The exact model of normal data with MEAN and STD, its noise prediction times `factor`."""
    in_channels, input_size, num_classes, learn_sigma = 4, 8, 10, False

    def __init__(self, schedule=LINEAR, factor=1.0):
        super().__init__()
        self.sigmas, self.factor = ((1 - schedule.alphas_cumprod) / schedule.alphas_cumprod).sqrt().numpy(), factor

    def forward(self, x, t, y):
        a = 1 / (1 + np.interp(float(t[0]), np.arange(1000), self.sigmas) ** 2)
        return self.factor * math.sqrt(1 - a) * (x - math.sqrt(a) * MEAN) / (a * STD**2 + 1 - a)


def states(model, schedule=LINEAR, steps="250", **settings):
    return sample_states(model, [0] * N, schedule, steps, seeds=range(N), **settings)


@pytest.mark.parametrize("schedule", [LINEAR, COSINE])
@pytest.mark.parametrize("settings", [
    {"method": "ddim"}, {}, {"method": diffusers.DPMSolverMultistepScheduler, "steps": 100}])
def test_input_of_an_exact_denoiser_follows_the_forward_process(schedule, settings):
    found = trace(states(Denoiser(schedule), schedule, **settings), schedule, REAL, LIMIT)
    assert len(found.steps) == settings.get("steps", 250)
    assert found.steps.norm_ratio.between(0.97, 1.03).all()
    assert found.steps.variance_ratio.between(0.97, 1.03).all()
    assert found.exits.isna().all().all()


def test_forward_columns_are_the_statistics_of_noised_latents():
    found = trace(states(Denoiser(), steps="10"), LINEAR, REAL, LIMIT).steps.set_index("timestep")
    for t in (111, 555, 888):
        noised = LINEAR.add_noise(REAL, torch.full((4000,), t), torch.randn(REAL.shape, generator=GENERATOR))
        assert noised.square().mean().sqrt().item() == pytest.approx(found.forward_norm[t], rel=3e-3)
        assert noised.var(0).mean().item() == pytest.approx(found.forward_variance[t], rel=3e-3)


def test_noise_predicted_too_small_shows_as_variance_that_grows_along_the_chain():
    def steps(factor, **settings):
        return trace(states(Denoiser(factor=factor), steps="50", method="ddim", **settings), LINEAR, REAL, LIMIT).steps

    exact, biased, remedied = steps(1.0), steps(0.97), steps(0.97, epsilon_scale=0.97)
    excess = biased.variance_ratio - exact.variance_ratio
    assert excess.iloc[0] == 0
    assert (excess.iloc[[0, 12, 24, 36, 48]].diff().dropna() > 0).all()
    assert biased.variance_ratio.iloc[-1] > 1 + 5 * biased.variance_ratio_error.iloc[-1]
    np.testing.assert_allclose(remedied.variance_ratio, exact.variance_ratio, rtol=1e-4)


def test_error_of_the_variance_ratio_is_its_spread_over_seeds():
    def first(seed):
        drawn = sample_states(Denoiser(), [0] * 64, LINEAR, "1", seeds=range(seed, seed + 64))
        return trace(drawn, LINEAR, REAL[:100], LIMIT).steps.iloc[0][["variance_ratio", "variance_ratio_error"]]

    draws = np.array([first(64 * i) for i in range(40)], dtype=float)
    assert draws[:, 1].mean() == pytest.approx(draws[:, 0].std(ddof=1), rel=0.35)


def test_percentiles_are_those_of_the_predicted_x0_of_each_image():
    every = list(states(Denoiser(), steps="10", x0_transform=clamp_x0(1.0)))
    found = trace(iter(every), LINEAR, REAL, LIMIT)
    assert found.x0.shape == (10, N, 4)
    expected = np.percentile(every[3].x0[7].abs().numpy(), (50, 99, 99.9, 100))
    np.testing.assert_allclose(found.x0[3, 7], expected, rtol=1e-6)
    assert found.x0[..., -1].max() > 1.0  # before the clamp
    assert torch.equal(found.latents, every[-1].sample)


class Scripted(nn.Module):
    """Two trajectories, one of which is told from a timestep on that the image is far outside the data."""
    in_channels, input_size, num_classes, learn_sigma = 4, 8, 10, False

    def __init__(self, script):
        super().__init__()
        self.script = script

    def forward(self, x, t, y):
        a = LINEAR.alphas_cumprod[int(t[0])].item()
        x0 = torch.zeros_like(x)
        x0[1] = self.script(int(t[0]))
        return (x - math.sqrt(a) * x0) / math.sqrt(1 - a)


def exits(script):
    return trace(sample_states(Scripted(script), [0, 0], LINEAR, "10", seeds=[0, 1], method="ddim"), LINEAR, REAL,
                 LIMIT).exits


def test_exits_name_the_timesteps_at_which_a_trajectory_leaves():
    """Steps are 999, 888, ... 0. An x0 of 40 from 555 on pulls the state out only as far as the next steps go."""
    found = exits(lambda t: 40.0 if t <= 555 else 0.0)
    assert found.loc[0].isna().all()
    assert found.x0[1] == 555
    a = {t: LINEAR.alphas_cumprod[t].item() for t in range(0, 1000, 111)}
    x, levels = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(1)), list(range(999, -1, -111))
    for t, later in itertools.pairwise(levels):
        x0 = 40.0 if t <= 555 else 0.0
        x = math.sqrt(a[later]) * x0 + math.sqrt((1 - a[later]) / (1 - a[t])) * (x - math.sqrt(a[t]) * x0)
        if x.abs().max() > math.sqrt(a[later]) * LIMIT + math.sqrt(1 - a[later]) * NOISE_LIMIT:
            break
    assert found.input[1] == later < 555


def test_trajectory_that_comes_back_has_not_left():
    found = exits(lambda t: 100.0 if t == 999 else 0.0)
    assert found.isna().all().all()


def test_values_that_are_no_numbers_have_left_the_data():
    found = exits(lambda t: float("nan") if t <= 444 else 0.0)
    assert found.loc[0].isna().all()
    assert list(found.loc[1]) == [333, 444]


def test_what_cannot_be_traced_is_refused():
    model = Denoiser()
    with pytest.raises(ValueError, match="expected at least 2"):
        trace(sample_states(model, [0], LINEAR, "2", seeds=[0]), LINEAR, REAL, LIMIT)
    with pytest.raises(ValueError, match="full schedule"):
        trace(states(model), LINEAR.respaced("250"), REAL, LIMIT)
    with pytest.raises(ValueError, match="no states"):
        trace(iter(()), LINEAR, REAL, LIMIT)
    assert sample(model, [0], LINEAR, "2", seeds=[0]).shape == (1, 4, 8, 8)
