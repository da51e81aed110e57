import math

import pytest
import torch
from torch import nn

from dit_repro.diffusion import NoiseSchedule
from dit_repro.sampling import at_levels_of, clamp_x0, dense_start, error_gain, sample, sample_states

LINEAR, COSINE = NoiseSchedule.linear(1000), NoiseSchedule.cosine(1000)


class Denoiser(nn.Module):
    """Exact on `schedule` for normal data with deviation `std`, for inputs within 4; its noise is off by `error`."""
    in_channels, input_size, num_classes, learn_sigma = 4, 4, 10, False

    def __init__(self, schedule, std=0.5, error=0.0):
        super().__init__()
        self.a, self.std, self.error = schedule.alphas_cumprod, std, error

    def forward(self, x, t, y):
        a = float(self.a[int(t[0])])
        return math.sqrt(1 - a) * x.clamp(-4, 4) / (self.std**2 * a + 1 - a) + self.error


@pytest.mark.parametrize("schedule", [LINEAR, COSINE, COSINE.respaced("25")], ids=repr)
def test_gain_is_how_far_an_error_in_the_noise_moves_the_next_state(schedule):
    x = torch.randn(1, 4, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for index in (0, 1, schedule.num_steps // 2, schedule.num_steps - 1):
        t = torch.tensor([index])
        means = [schedule.posterior(schedule.predict_x0(x, t, x + error), x, t)[0] for error in (0.0, 1e-3)]
        moved = (means[0] - means[1]).mean().item() / 1e-3
        assert moved == pytest.approx(error_gain(schedule)[index].item(), rel=1e-6)


def test_first_gain_of_the_cosine_schedule_is_that_of_its_clipped_beta():
    assert error_gain(COSINE)[-1].item() == pytest.approx(0.999 / math.sqrt(0.001), rel=1e-6)
    assert error_gain(LINEAR)[-1].item() == pytest.approx(0.02 / math.sqrt(0.98), rel=1e-4)


def test_same_error_of_the_network_throws_samples_off_on_the_cosine_schedule_alone():
    def largest(schedule, **settings):
        model = Denoiser(schedule, error=0.05)
        return sample(model, [0] * 8, schedule, "50", seeds=range(8), **settings).abs().max().item()

    assert largest(LINEAR) < 4
    assert largest(COSINE) > 20
    assert largest(COSINE, x0_transform=clamp_x0(2.0)) < 4


def test_dense_start_begins_with_the_steps_of_the_full_chain():
    chain = dense_start(COSINE, "10", 20)
    assert chain.timesteps.tolist() == [0, 111, 222, 333, 444, 555, 666, 777, 888, *range(980, 1000)]
    torch.testing.assert_close(chain.betas[-19:], COSINE.betas[-19:], rtol=1e-9, atol=0)
    torch.testing.assert_close(chain.alphas_cumprod, COSINE.alphas_cumprod[chain.timesteps], rtol=1e-9, atol=0)
    first, full = (next(iter(sample_states(Denoiser(COSINE), [0], s, s.num_steps, seeds=[3]))) for s in (chain, COSINE))
    assert torch.equal(first.sample, full.sample)


@pytest.mark.parametrize("schedule, dense", [(COSINE.respaced("10"), 2), (COSINE, 0), (COSINE, 1001)])
def test_dense_start_that_does_not_exist_is_refused(schedule, dense):
    with pytest.raises(ValueError, match="expected the full schedule"):
        dense_start(schedule, "5", dense)


def test_own_levels_are_the_own_schedule():
    assert torch.equal(at_levels_of(LINEAR, LINEAR).timesteps, LINEAR.timesteps)


@pytest.mark.parametrize("levels, trained", [(COSINE, LINEAR), (LINEAR, COSINE)], ids=["linear net", "cosine net"])
def test_network_samples_its_data_at_the_levels_of_another_schedule_but_not_with_its_timesteps(levels, trained):
    def deviation(schedule):
        model = Denoiser(trained, std=0.1)
        return sample(model, [0] * 64, schedule, "250", seeds=range(64), method="ddim").std().item()

    assert deviation(at_levels_of(levels, trained)) == pytest.approx(0.1, rel=0.08)
    assert abs(math.log(deviation(levels) / 0.1)) > 0.5
