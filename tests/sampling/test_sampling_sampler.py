import weakref
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

from dit_repro.diffusion import NoiseSchedule
from dit_repro.sampling import Guidance, clamp_x0, dynamic_threshold, sample, sample_states

LINEAR = NoiseSchedule.linear(1000)


class Elementwise(nn.Module):
    """A deterministic model without matrix products, so that a batch cannot change a bit of a sample."""

    def __init__(self, learn_sigma=True, num_classes=10):
        super().__init__()
        self.in_channels, self.input_size, self.num_classes, self.learn_sigma = 4, 4, num_classes, learn_sigma
        self.weight = nn.Parameter(torch.tensor(0.8))
        self.frozen = nn.Identity().eval()
        self.dropout = nn.Dropout(0.5)
        self.calls, self.fail_at = 0, None

    def forward(self, x, t, y):
        self.calls += 1
        if self.calls == self.fail_at:
            raise RuntimeError("out of memory")
        condition = (y / 10 + t / 1000).view(-1, 1, 1, 1)
        eps = self.dropout(torch.tanh(self.weight * x + condition))
        return torch.cat([eps, torch.tanh(x - condition)], 1) if self.learn_sigma else eps


@pytest.mark.parametrize("method, settings", [
    ("ddpm", {}), ("ddpm", {"variance": "fixed_large"}), ("ddim", {}), ("ddim", {"eta": 0.7}), ("bridge", {})])
def test_image_of_a_seed_is_the_same_at_any_batch_size(method, settings):
    if method == "bridge":
        from diffusers import EulerAncestralDiscreteScheduler as method
    draw = partial(sample, Elementwise(), schedule=LINEAR, steps="10", method=method, guidance=Guidance(2.0),
                   **settings)
    labels, seeds = [3, 1, 4, 1, 5, 9, 2], [10, 11, 12, 13, 14, 15, 10]
    together = draw(labels=labels, seeds=seeds, batch_size=7)
    assert together.shape == (7, 4, 4, 4) and together.dtype == torch.float32
    for batch_size in (1, 3):
        assert torch.equal(draw(labels=labels, seeds=seeds, batch_size=batch_size), together)
    assert torch.equal(draw(labels=labels[::-1], seeds=seeds[::-1]).flip(0), together)
    assert not torch.equal(together[1], together[3])  # same label, another seed


def test_a_seed_starts_from_the_same_noise_in_every_method_and_at_every_step_count():
    expected = torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(5))
    for settings in ({}, {"method": "ddim"}, {"steps": 3}):
        first = next(sample_states(Elementwise(), [2], LINEAR, seeds=[5], **settings))
        assert torch.equal(first.x_t[0], expected)


def test_end_of_the_states_is_the_sample():
    settings = {"schedule": LINEAR, "steps": 6, "seeds": [0, 1], "guidance": Guidance(1.5)}
    states = list(sample_states(Elementwise(), [0, 1], **settings))
    assert [state.timestep for state in states] == [999, 799, 599, 400, 200, 0]
    assert torch.equal(states[-1].sample, sample(Elementwise(), [0, 1], **settings))
    for state, following in pairwise(states):
        assert torch.equal(state.sample, following.x_t)


def test_one_step_is_enough_and_starts_from_pure_noise():
    states = list(sample_states(Elementwise(), [0], LINEAR, 1, seeds=[0]))
    assert [state.timestep for state in states] == [999]
    torch.testing.assert_close(states[0].sample, states[0].x0)


@pytest.fixture
def training_model():
    """In train mode but for a part that its owner froze."""
    model = Elementwise().train()
    model.frozen.eval()
    return model


def modes(model):
    return torch.is_grad_enabled(), [module.training for module in model.modules()]


def test_grad_and_train_mode_are_the_callers_between_states_and_after_giving_up(training_model):
    before = modes(training_model)
    states = sample_states(training_model, [0], LINEAR, 5, seeds=[0])
    state = next(states)
    assert modes(training_model) == before  # the generator is alive and may never be resumed
    assert not state.sample.requires_grad
    with torch.no_grad():
        next(states)
        assert not torch.is_grad_enabled()
    states.close()
    assert modes(training_model) == before


def test_grad_and_train_mode_come_back_after_an_error_in_the_model(training_model):
    before = modes(training_model)
    training_model.fail_at = 3
    with pytest.raises(RuntimeError, match="out of memory"):
        sample(training_model, [0], LINEAR, 5, seeds=[0])
    assert modes(training_model) == before


def test_a_model_in_train_mode_samples_as_in_eval_mode(training_model):
    in_train = sample(training_model, [0, 1], LINEAR, 5, seeds=[0, 1])
    assert torch.equal(in_train, sample(training_model.eval(), [0, 1], LINEAR, 5, seeds=[0, 1]))


def test_no_state_outlives_its_step():
    class Watched(Elementwise):
        seen, most = (), 0

        def forward(self, x, t, y):
            self.seen = [ref for ref in self.seen if ref() is not None] + [weakref.ref(x)]
            self.most = max(self.most, len(self.seen))
            return super().forward(x, t, y)

    model = Watched()
    sample(model, [0] * 12, LINEAR, 20, seeds=range(12), batch_size=3)
    assert model.most <= 3  # not 80


def test_epsilon_scale_divides_the_noise_before_anything_else():
    model = Elementwise()
    state = next(sample_states(model, [3], LINEAR, 10, seeds=[0], epsilon_scale=1.02, method="ddim"))
    eps = model.eval()(state.x_t, torch.tensor([999]), torch.tensor([3]))[:, :4].detach() / 1.02
    torch.testing.assert_close(state.x0, LINEAR.predict_x0(state.x_t, torch.tensor([999]), eps))


@pytest.mark.parametrize("method", ["ddpm", "ddim", "bridge"])
def test_clamped_x0_keeps_every_method_in_range_and_unclamped_walks_off(method):
    """A model that predicts no noise sends x0 to x_t / sqrt(a), up to 157 times the data."""
    class NoNoise(Elementwise):
        def forward(self, x, t, y):
            return 0 * x

    if method == "bridge":
        from diffusers import DPMSolverMultistepScheduler as method
    draw = partial(sample, NoNoise(learn_sigma=False), [0, 1], LINEAR, 20, seeds=[0, 1], method=method)
    assert draw().abs().max() > 100
    assert draw(x0_transform=clamp_x0(4.0)).abs().max() <= 4.0001
    assert draw(x0_transform=dynamic_threshold(99.5, 4.0)).abs().max() <= 4.0001


def test_states_hold_the_x0_from_before_the_transform():
    plain = next(sample_states(Elementwise(), [0], LINEAR, 10, seeds=[0]))
    clamped = next(sample_states(Elementwise(), [0], LINEAR, 10, seeds=[0], x0_transform=clamp_x0(1.0)))
    assert torch.equal(plain.x0, clamped.x0) and not torch.equal(plain.sample, clamped.sample)


def test_dynamic_threshold_leaves_images_inside_the_floor_alone_and_scales_the_others():
    x0 = torch.randn(3, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    x0[0] = x0[0].clamp(-2, 2)
    x0[1] *= 10
    transform = dynamic_threshold(99.0, 2.0)
    result = transform(x0)
    torch.testing.assert_close(result[0], x0[0])
    assert result.abs().max() <= 2.00001
    inside = x0[1].abs() < x0[1].abs().quantile(0.99)
    ratio = result[1][inside] / x0[1][inside]
    torch.testing.assert_close(ratio, ratio[0].expand_as(ratio))  # contrast is scaled, not cut
    torch.testing.assert_close(transform(x0[2:]), result[2:])     # image by image


@pytest.mark.parametrize("make, values", [(clamp_x0, (0,)), (clamp_x0, (float("nan"),)), (dynamic_threshold, (0, 1)),
                                          (dynamic_threshold, (101, 1)), (dynamic_threshold, (99.5, -1))])
def test_bad_threshold_is_refused(make, values):
    with pytest.raises(ValueError, match=f"{make.__name__}: .*expected"):
        make(*values)


@pytest.mark.parametrize("settings, message", [
    ({"steps": 0}, "steps=0"),
    ({"steps": 1001}, "steps=1001"),
    ({"labels": [0, 10]}, "0 to 9"),
    ({"labels": [0, -1]}, "0 to 9"),
    ({"labels": [], "seeds": []}, "at least 1"),
    ({"labels": [0.5, 1.0]}, "integers"),
    ({"seeds": [1]}, "1 seeds for 2 labels"),
    ({"batch_size": 0}, "batch_size=0"),
    ({"method": "euler"}, "method='euler'"),
    ({"method": "ddim", "eta": 1.5}, "eta=1.5"),
    ({"eta": 0.5}, "only method=\"ddim\""),
    ({"method": "ddim", "variance": "learned"}, "only method=\"ddpm\""),
    ({"variance": "small"}, "variance='small'"),
    ({"epsilon_scale": 0}, "epsilon_scale=0"),
])
def test_bad_settings_are_refused_before_any_work(settings, message):
    model = Elementwise()
    arguments = {"labels": [0, 1], "steps": 5, "seeds": [0, 1], **settings}
    with pytest.raises(ValueError, match=message):
        sample(model, schedule=LINEAR, **arguments)
    assert model.calls == 0
    if "batch_size" not in settings:
        with pytest.raises(ValueError, match=message):  # at the call, not at the first state
            sample_states(model, schedule=LINEAR, **arguments)


def test_learned_variance_is_refused_for_a_model_without_and_the_default_then_is_fixed():
    model = Elementwise(learn_sigma=False)
    with pytest.raises(ValueError, match="learn_sigma=False"):
        sample(model, [0], LINEAR, 5, seeds=[0], variance="learned")
    default = sample(model, [0], LINEAR, 5, seeds=[0])
    assert torch.equal(default, sample(model, [0], LINEAR, 5, seeds=[0], variance="fixed_small"))
    learned = sample(Elementwise(), [0], LINEAR, 5, seeds=[0])
    assert torch.equal(learned, sample(Elementwise(), [0], LINEAR, 5, seeds=[0], variance="learned"))
