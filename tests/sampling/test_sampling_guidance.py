import math

import pytest
import torch
from torch import nn

from dit_repro.diffusion import NoiseSchedule
from dit_repro.sampling import Guidance, sample, sample_states
from dit_repro.sampling.guidance import guided_output

LINEAR = NoiseSchedule.linear(1000)


class Counting(nn.Module):
    """Output depends on the label; remembers (batch size, timestep, labels) of each forward pass."""
    in_channels, input_size, num_classes, learn_sigma = 4, 4, 10, True

    def __init__(self, deaf=False):
        super().__init__()
        self.deaf, self.calls = deaf, []

    def forward(self, x, t, y):
        self.calls.append((len(x), t[0].item(), y.tolist()))
        if self.deaf:
            y = 0 * y
        channel = torch.arange(1, 9.0).view(1, 8, 1, 1)
        return torch.tanh(torch.cat([x, x], 1) * channel / 4 + y.view(-1, 1, 1, 1) / 5)


def halves(model, x, timestep, labels):
    t = torch.full((len(x),), timestep)
    return model(x, t, labels), model(x, t, torch.full_like(labels, 10))


@pytest.fixture
def x():
    return torch.randn(3, 4, 4, 4, generator=torch.Generator().manual_seed(0))


LABELS = torch.tensor([0, 4, 9])


def test_scale_one_costs_one_forward_pass_of_n_a_step():
    model = Counting()
    sample(model, [1, 2, 3], LINEAR, 5, seeds=[0, 1, 2], guidance=Guidance(1.0))
    assert [(size, labels) for size, _, labels in model.calls] == [(3, [1, 2, 3])] * 5


def test_scale_zero_is_the_unconditional_model_in_every_channel():
    model = Counting()
    unconditional = sample(model, [1, 2], LINEAR, 5, seeds=[7, 7], guidance=Guidance(0.0))
    assert [(size, labels) for size, _, labels in model.calls] == [(2, [10, 10])] * 5
    assert torch.equal(unconditional[0], unconditional[1])


def test_guided_equals_conditional_when_the_two_outputs_agree():
    model = Counting(deaf=True)
    plain = sample(model, [1, 2], LINEAR, 8, seeds=[0, 1])
    for guidance in (Guidance(4.0), Guidance(7.5, channels=None), Guidance(4.0, rescale=0.7)):
        torch.testing.assert_close(sample(model, [1, 2], LINEAR, 8, seeds=[0, 1], guidance=guidance), plain)


def test_paper_guides_three_channels_and_leaves_the_fourth_and_the_variance_conditional(x):
    model = Counting()
    conditional, unconditional = halves(model, x, 500, LABELS)
    output = guided_output(model, x, 500, LABELS, Guidance(1.5), 1000)
    torch.testing.assert_close(output[:, :3], unconditional[:, :3] + 1.5 * (conditional - unconditional)[:, :3])
    assert torch.equal(output[:, 3:], conditional[:, 3:])
    everything = guided_output(model, x, 500, LABELS, Guidance(1.5, channels=None), 1000)
    torch.testing.assert_close(everything[:, 3], unconditional[:, 3] + 1.5 * (conditional - unconditional)[:, 3])
    assert torch.equal(everything[:, 4:], conditional[:, 4:])


def test_interval_guides_inside_and_costs_one_pass_outside():
    model = Counting()
    sample(model, [1, 2], LINEAR, 10, seeds=[0, 1], guidance=Guidance(3.0, interval=(222, 666)))
    assert {t: size for size, t, _ in model.calls} == {
        999: 2, 888: 2, 777: 2, 666: 4, 555: 4, 444: 4, 333: 4, 222: 4, 111: 2, 0: 2}


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_schedules_have_the_same_mean_scale_and_only_the_growing_ones_start_unguided(schedule):
    guidance = Guidance(4.0, schedule=schedule)
    scales = [guidance.scale_at(t, 1000) for t in range(1000)]
    assert sum(scales) / 1000 == pytest.approx(4.0, abs=1e-9)
    ends = {"constant": (4.0, 4.0), "linear": (1.0, 7.0), "cosine": (1.0, 7.0)}[schedule]
    assert (scales[999], scales[0]) == pytest.approx(ends)
    assert scales == sorted(scales, reverse=True)
    if schedule == "cosine":
        assert scales[250] == pytest.approx(1 + 3 * (1 + math.cos(math.pi * 250 / 999)))


def test_full_rescale_gives_back_the_conditional_deviation_of_the_guided_channels(x):
    model = Counting()
    conditional, _ = halves(model, x, 500, LABELS)
    plain = guided_output(model, x, 500, LABELS, Guidance(6.0), 1000)
    half = guided_output(model, x, 500, LABELS, Guidance(6.0, rescale=0.5), 1000)
    full = guided_output(model, x, 500, LABELS, Guidance(6.0, rescale=1.0), 1000)
    torch.testing.assert_close(full[:, :3].flatten(1).std(1), conditional[:, :3].flatten(1).std(1))
    torch.testing.assert_close(half, (plain + full) / 2)
    assert not torch.allclose(plain, full)


def test_guidance_reaches_the_states_of_the_sampler(x):
    """The x0 of a state is that of the guided noise."""
    model = Counting()
    state = next(sample_states(model, LABELS, LINEAR, 10, seeds=[0, 1, 2], guidance=Guidance(2.5)))
    conditional, unconditional = halves(model, state.x_t, 999, LABELS)
    eps = conditional[:, :4].clone()
    eps[:, :3] = unconditional[:, :3] + 2.5 * (conditional - unconditional)[:, :3]
    torch.testing.assert_close(state.x0, LINEAR.predict_x0(state.x_t, torch.tensor([999] * 3), eps))


@pytest.mark.parametrize("setting", [{"scale": -0.5}, {"scale": math.inf}, {"channels": 0}, {"interval": (600, 200)},
                                     {"schedule": "sine"}, {"scale": 0.5, "schedule": "linear"}, {"rescale": 1.5}])
def test_bad_guidance_is_refused_by_name_when_it_is_made(setting):
    with pytest.raises(ValueError, match=f"guidance {next(iter(setting))}="):
        Guidance(**setting)
