import math

import pytest
import torch
from torch import nn

from dit_repro.diffusion import (
    NoiseSchedule,
    Objective,
    loss_of_gaussian,
    loss_of_unit_gaussian,
    training_losses,
    variational_bound,
)

LINEAR = NoiseSchedule.linear(1000)
SHAPE = (8, 4, 4, 4)
Y = torch.zeros(8, dtype=torch.int64)


class Scaled(nn.Module):
    """Noise prediction w_eps * x, variance values w_v, as two parameters whose gradients can be told apart."""

    def __init__(self, learn_sigma=True, w_eps=0.3, w_v=-0.2):
        super().__init__()
        self.learn_sigma = learn_sigma
        self.w_eps, self.w_v = nn.Parameter(torch.tensor(w_eps)), nn.Parameter(torch.tensor(w_v))
        self.seen = []

    def forward(self, x, t, y):
        self.seen.append(t)
        eps = self.w_eps * x
        return torch.cat([eps, self.w_v.expand_as(x)], 1) if self.learn_sigma else eps


class GaussianDenoiser(nn.Module):
    """The exact model of N(mean, std^2) data in every dimension, its reverse variance included; in float64.

    E[x0|x_t] and Var[x0|x_t] are those of a normal prior; the reverse step adds the second, through the posterior mean,
    to the posterior variance. The variance output is what makes `log_variance` give exactly that.
    """

    def __init__(self, schedule, mean, std):
        super().__init__()
        self.schedule, self.mean, self.std = schedule, mean, std

    def forward(self, x, t, y):
        schedule = self.schedule
        index = torch.searchsorted(schedule.timesteps, t)
        a = schedule.alphas_cumprod[index].view(-1, 1, 1, 1)
        total = a * self.std**2 + 1 - a  # Var[x_t]
        eps = (1 - a).sqrt() / total * (x - a.sqrt() * self.mean)
        before = torch.cat([torch.ones(1).double(), schedule.alphas_cumprod[:-1]])[index].view(-1, 1, 1, 1)
        beta = schedule.betas[index].view(-1, 1, 1, 1)
        small = beta * (1 - before) / (1 - a)
        variance = small + (before.sqrt() * beta / (1 - a)) ** 2 * self.std**2 * (1 - a) / total
        zero = torch.zeros_like(x)
        low, high = (schedule.log_variance("learned", index, zero + v) for v in (-1.0, 1.0))
        return torch.cat([eps, 2 * (variance.log() - low) / (high - low) - 1], 1)


class Oracle(nn.Module):
    """Knows x0, and returns the true posterior: exact noise, posterior variance."""

    def __init__(self, x0, schedule):
        super().__init__()
        self.x0, self.schedule = x0, schedule

    def forward(self, x, t, y):
        return torch.cat([self.schedule.predict_eps(x, t, self.x0), -torch.ones_like(x)], 1)


def data(dtype=torch.float32, std=1.0, mean=0.0, shape=SHAPE, seed=0):
    x0, noise = torch.randn(2, *shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)).unbind()
    return mean + std * x0, noise


def test_losses_are_their_closed_forms():
    x0, noise = data()
    t = torch.tensor([1, 3, 10, 100, 300, 500, 800, 999])
    model = Scaled()
    losses = training_losses(model, x0, t, Y, LINEAR, Objective(), noise=noise)
    x_t = LINEAR.add_noise(x0, t, noise)
    torch.testing.assert_close(losses.mse, (0.3 * x_t - noise).square().mean((1, 2, 3)))
    mean, _, log_variance = LINEAR.posterior(x0, x_t, t)
    true = torch.distributions.Normal(mean.double(), log_variance.double().mul(0.5).exp())
    guess = LINEAR.posterior(LINEAR.predict_x0(x_t, t, 0.3 * x_t), x_t, t)[0].double()
    ours = torch.distributions.Normal(guess, LINEAR.log_variance("learned", t, -0.2 + 0 * x_t).double().mul(0.5).exp())
    bits = torch.distributions.kl_divergence(true, ours).mean((1, 2, 3)) / math.log(2)
    torch.testing.assert_close(losses.vb.double(), bits, rtol=2e-3, atol=1e-6)
    torch.testing.assert_close(losses.total, losses.mse + losses.vb)


def test_loss_at_the_zero_output_is_the_papers_one_and_a_bit():
    """A DiT starts at output zero: noise error 1, bound 0.016 bits on average, about 2 of them at t = 0."""
    x0, noise = data(shape=(1000, 4, 4, 4))
    model = Scaled(w_eps=0.0, w_v=0.0)
    losses = training_losses(model, x0, torch.arange(1000), torch.zeros(1000).long(), LINEAR, Objective(), noise=noise)
    assert losses.mse.mean().item() == pytest.approx(1.0, abs=0.02)
    assert losses.vb.mean().item() == pytest.approx(0.016, abs=0.002)
    assert losses.vb[0].item() == pytest.approx(2, abs=0.8)


def test_bound_trains_the_variance_alone_when_detached_and_both_when_not():
    x0, noise = data()
    t = torch.tensor([0, 3, 10, 100, 300, 500, 800, 999])
    for detach in (True, False):
        model = Scaled()
        training_losses(model, x0, t, Y, LINEAR, Objective(detach_mean=detach), noise=noise).vb.mean().backward()
        assert model.w_v.grad.abs() > 0
        assert (model.w_eps.grad == 0) if detach else (model.w_eps.grad.abs() > 0)


def test_gradients_stay_finite_where_the_variance_output_is_absurd():
    x0, noise = data()
    for value in (-40.0, 40.0):
        model = Scaled(w_v=value)
        t = torch.tensor([0, 3, 10, 100, 300, 500, 800, 999])
        training_losses(model, x0, t, Y, LINEAR, Objective(detach_mean=False), noise=noise).vb[1:].sum().backward()
        assert torch.isfinite(model.w_eps.grad) and torch.isfinite(model.w_v.grad)


def test_first_term_is_the_probability_of_the_bin():
    """With one value a sample, against the exact normal distribution function; outer bins are open."""
    x0 = torch.tensor([-1.5, -1.0, -0.3, 0.0, 0.2, 0.9995, 1.0, 2.0], dtype=torch.float64).view(8, 1, 1, 1)
    model = Scaled(w_eps=0.0, w_v=0.0)
    t = torch.zeros(8, dtype=torch.int64)
    noise = 0.5 * torch.ones_like(x0)
    bits = training_losses(model, x0, t, Y, LINEAR, Objective(), noise=noise).vb
    x_t = LINEAR.add_noise(x0, t, noise)
    mean = LINEAR.posterior(LINEAR.predict_x0(x_t, t, 0 * x_t), x_t, t)[0]
    normal = torch.distributions.Normal(mean, LINEAR.log_variance("learned", t, 0 * x_t).mul(0.5).exp())
    upper, lower = normal.cdf(x0 + 1 / 255), normal.cdf(x0 - 1 / 255)
    expected = -torch.log2(torch.where(x0 < -0.999, upper, torch.where(x0 > 0.999, 1 - lower, upper - lower)))
    torch.testing.assert_close(bits, expected.flatten(), rtol=0, atol=2e-3)


def test_model_is_given_the_original_timesteps_of_a_respaced_schedule():
    schedule, model = LINEAR.respaced(10), Scaled()
    x0, noise = data()
    training_losses(model, x0, torch.tensor([0, 1, 2, 3, 4, 5, 6, 9]), Y, schedule, Objective(), noise=noise)
    assert model.seen[0].tolist() == [0, 111, 222, 333, 444, 555, 666, 999]


def test_noise_only_objective_has_no_bound_and_needs_no_variance_output():
    x0, noise = data()
    losses = training_losses(Scaled(False), x0, torch.arange(8), Y, LINEAR, Objective(learn_sigma=False), noise=noise)
    assert (losses.vb == 0).all() and torch.equal(losses.total, losses.mse)


@pytest.mark.parametrize("learn_sigma", [True, False])
def test_model_and_objective_that_disagree_on_variance_are_refused(learn_sigma):
    x0, noise = data()
    with pytest.raises(ValueError, match=f"learn_sigma={learn_sigma}"):
        training_losses(Scaled(not learn_sigma), x0, torch.arange(8), Y, LINEAR, Objective(learn_sigma), noise=noise)


def test_min_snr_weighs_the_noise_error_and_not_the_bound():
    x0, noise = data()
    t = torch.tensor([0, 10, 50, 100, 200, 500, 800, 999])
    plain = training_losses(Scaled(), x0, t, Y, LINEAR, Objective(), noise=noise)
    weighted = training_losses(Scaled(), x0, t, Y, LINEAR, Objective(min_snr_gamma=5.0), noise=noise)
    a = LINEAR.alphas_cumprod[t]
    expected = (5 * (1 - a) / a).clamp(max=1).float()
    torch.testing.assert_close(weighted.weight, expected)
    assert (plain.weight == 1).all() and expected[0] < 0.01 and expected[-1] == 1
    torch.testing.assert_close(weighted.total - plain.vb, expected * plain.mse)


def test_noise_options_share_the_plain_noise_and_add_what_they_say():
    shape = (4000, 4, 2, 2)
    drawn = {}
    for name, objective in {"plain": Objective(), "offset": Objective(noise_offset=0.5),
                            "perturbed": Objective(input_perturbation=0.2)}.items():
        drawn[name] = objective.draw_noise(shape, torch.Generator().manual_seed(3))
    plain, same = drawn["plain"]
    assert plain is same and torch.equal(drawn["perturbed"][0], plain)
    offset = drawn["offset"][0] - plain
    torch.testing.assert_close(offset, offset[:, :, :1, :1].expand_as(offset))
    assert offset.std() == pytest.approx(0.5, rel=0.05)
    extra = drawn["perturbed"][1] - plain
    assert extra.std() == pytest.approx(0.2, rel=0.02)
    assert (extra * plain).mean().abs() < 0.01


def test_perturbed_input_keeps_the_plain_noise_as_target():
    x0, _ = data()
    objective = Objective(learn_sigma=False, input_perturbation=0.1)
    noise, input_noise = objective.draw_noise(SHAPE, torch.Generator().manual_seed(1))
    t = torch.arange(8) * 100
    losses = training_losses(Scaled(False), x0, t, Y, LINEAR, objective, noise=noise, input_noise=input_noise)
    x_t = LINEAR.add_noise(x0, t, input_noise)
    torch.testing.assert_close(losses.mse, (0.3 * x_t - noise).square().mean((1, 2, 3)))
    with pytest.raises(ValueError, match="input_noise"):
        training_losses(Scaled(False), x0, t, Y, LINEAR, objective, noise=noise)


@pytest.mark.parametrize("setting", [{"vb_weight": -1}, {"noise_offset": math.nan}, {"input_perturbation": -0.1},
                                     {"min_snr_gamma": 0}])
def test_bad_objective_is_refused_by_name(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        Objective(**setting)


def test_bound_is_tight_with_the_true_posterior():
    x0, _ = data(torch.float64)
    bound = variational_bound(Oracle(x0, LINEAR), x0, Y, LINEAR, torch.Generator().manual_seed(0))
    assert bound.terms.shape == (8, 1000)
    assert bound.terms[:, 1:].abs().max() < 1e-9


@pytest.mark.parametrize("num_steps, count, tolerance", [(1000, 48, 0.02), (100, 2000, 0.004)])
def test_bound_of_the_exact_gaussian_model_is_the_entropy_of_its_data(num_steps, count, tolerance):
    """The exact reverse chain makes the bound the true -log p(x0): over the data, their entropy in 8-bit bins."""
    std, mean = 0.3, 0.1
    schedule = LINEAR.respaced(num_steps)
    x0, _ = data(torch.float64, std=std, mean=mean, shape=(count, 4, 4, 4), seed=1)
    y = torch.zeros(count, dtype=torch.int64)
    bound = variational_bound(GaussianDenoiser(schedule, mean, std), x0, y, schedule, torch.Generator().manual_seed(0))
    surprise = 0.5 * ((x0 - mean) / std) ** 2 + 0.5 * math.log(2 * math.pi * std**2)
    exact = surprise.mean().item() / math.log(2) + math.log2(255 / 2)
    assert bound.total.mean() == pytest.approx(exact, abs=tolerance)


def test_bound_of_a_fixed_variance_is_looser_and_more_so_at_few_steps():
    std, excess = 0.3, {}
    x0, _ = data(torch.float64, std=std, shape=(200, 4, 4, 4))
    y = torch.zeros(200, dtype=torch.int64)
    for num_steps in (10, 100):
        schedule = LINEAR.respaced(num_steps)
        exact = GaussianDenoiser(schedule, 0.0, std)

        class NoiseOnly(nn.Module):
            def forward(self, x, t, y, exact=exact):
                return exact(x, t, y)[:, :4]

        best = variational_bound(exact, x0, y, schedule, torch.Generator().manual_seed(0)).total.mean()
        for variance in ("fixed_small", "fixed_large"):
            bound = variational_bound(NoiseOnly(), x0, y, schedule, torch.Generator().manual_seed(0), variance)
            excess[variance, num_steps] = (bound.total.mean() - best).item()
    assert all(value > 0 for value in excess.values())
    assert excess["fixed_small", 10] > excess["fixed_small", 100]


def test_prior_term_is_the_divergence_from_a_standard_normal():
    x0, _ = data(torch.float64)
    schedule = LINEAR.respaced("ddim2")  # ends at timestep 500, where much of x0 is left
    bound = variational_bound(Oracle(x0, LINEAR), x0, Y, schedule, torch.Generator().manual_seed(0))
    a = schedule.alphas_cumprod[-1]
    normal = torch.distributions.Normal(a.sqrt() * x0, (1 - a).sqrt())
    exact = torch.distributions.kl_divergence(normal, torch.distributions.Normal(torch.zeros_like(x0), 1.0))
    torch.testing.assert_close(bound.prior, exact.mean((1, 2, 3)) / math.log(2))


def test_bound_refuses_an_unknown_variance():
    with pytest.raises(ValueError, match="fixed_small"):
        variational_bound(Scaled(), *data()[:1], Y, LINEAR, torch.Generator(), "small")


def test_loss_of_gaussian_is_that_of_the_unit_gaussian_for_white_latents():
    torch.testing.assert_close(loss_of_gaussian(LINEAR, torch.eye(7)), loss_of_unit_gaussian(LINEAR))


def test_loss_of_gaussian_is_the_error_of_the_linear_regression_of_noise_on_the_noisy_latent():
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    x0 = torch.randn(200_000, 3, generator=generator, dtype=torch.float64) @ mixing.T
    noise = torch.randn(x0.shape, generator=generator, dtype=torch.float64)
    for index in (50, 300, 700):
        a = LINEAR.alphas_cumprod[index]
        x_t = a.sqrt() * x0 + (1 - a).sqrt() * noise
        residual = noise - x_t @ torch.linalg.lstsq(x_t, noise).solution
        expected = loss_of_gaussian(LINEAR, mixing @ mixing.T)[index]
        assert residual.square().mean().item() == pytest.approx(expected.item(), rel=0.01)
