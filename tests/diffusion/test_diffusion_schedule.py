import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dit_repro.diffusion import NoiseSchedule, loss_of_unit_gaussian

LINEAR, COSINE = NoiseSchedule.linear(1000), NoiseSchedule.cosine(1000)


def test_linear_schedule_has_the_golden_values():
    a = LINEAR.alphas_cumprod
    assert a.dtype == torch.float64
    assert a[0] == pytest.approx(0.9999, abs=1e-12)
    assert a[499] == pytest.approx(0.078587, abs=5e-7)
    assert a[999] == pytest.approx(4.0358e-5, rel=2e-5)
    assert a[49] == pytest.approx(0.971, abs=5e-5)  # "t = 50" and "t = 800" where timesteps are counted from 1
    assert a[799] == pytest.approx(0.0015, abs=5e-5)


def test_cosine_schedule_has_the_golden_end_and_clips_beta():
    assert COSINE.alphas_cumprod[999] == pytest.approx(2.43e-9, rel=2e-3)
    assert COSINE.betas.max() == 0.999


def test_short_linear_schedule_is_scaled_to_end_in_noise():
    assert NoiseSchedule.linear(250).alphas_cumprod[-1] < 1e-4  # 0.0797 without the factor 1000/T


def test_best_predictor_of_a_unit_gaussian_loses_what_the_book_says():
    assert loss_of_unit_gaussian(LINEAR).mean() == pytest.approx(0.2755, abs=5e-5)
    x0, noise = torch.randn(2, 200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
    for t in (50, 300, 800):
        x_t = LINEAR.add_noise(x0, torch.full((len(x0),), t), noise)
        slope = (x_t * noise).mean() / x_t.square().mean()  # least squares, the best linear predictor of this sample
        assert (noise - slope * x_t).square().mean() == pytest.approx(float(loss_of_unit_gaussian(LINEAR)[t]), rel=0.02)


def test_respacing_to_250_takes_the_official_timesteps():
    timesteps = LINEAR.respaced("250").timesteps.tolist()
    assert timesteps[:3] == [0, 4, 8] and timesteps[-2:] == [995, 999] and len(timesteps) == 250


def test_ddim_form_takes_whole_strides_or_refuses():
    assert LINEAR.respaced("ddim250").timesteps.tolist() == list(range(0, 1000, 4))
    assert LINEAR.respaced("ddim50").timesteps[-1] == 980
    for count in (64, 1):
        with pytest.raises(ValueError, match=f"ddim{count}'"):
            LINEAR.respaced(f"ddim{count}")


def test_ties_between_steps_fall_where_the_official_running_sum_puts_them():
    assert LINEAR.respaced(21).timesteps[10] == 499  # 49.95 * 10 is 499.5, its running sum a little less
    assert LINEAR.respaced(3).timesteps.tolist() == [0, 500, 999]


@given(count=st.integers(1, 1000), schedule=st.sampled_from([LINEAR, COSINE]))
def test_respaced_schedule_is_the_same_process_at_any_count(count, schedule):
    respaced = schedule.respaced(count)
    timesteps = respaced.timesteps
    assert len(timesteps) == respaced.num_steps == count and timesteps[-1] == 999
    assert (timesteps.diff() > 0).all() and (count == 1 or timesteps[0] == 0)
    torch.testing.assert_close(respaced.alphas_cumprod, schedule.alphas_cumprod[timesteps], rtol=1e-12, atol=1e-15)
    assert respaced.num_train_steps == 1000


@given(st.sets(st.integers(2, 1000), min_size=2, max_size=2).map(sorted))
def test_respacing_a_respaced_schedule_still_names_original_timesteps(counts):
    few, many = counts
    twice = LINEAR.respaced(many).respaced(few)
    torch.testing.assert_close(twice.alphas_cumprod, LINEAR.alphas_cumprod[twice.timesteps], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("spec", [0, 1001, -3, "0", "", "fast", "ddim", 2.5, True, "10,20"])
def test_bad_step_count_is_refused_with_what_was_expected(spec):
    with pytest.raises(ValueError, match=r"steps=.*expected a count from 1 to 1000"):
        LINEAR.respaced(spec)


def test_impossible_schedules_are_refused():
    with pytest.raises(ValueError, match="21"):
        NoiseSchedule.linear(20)
    with pytest.raises(ValueError, match="at least 1"):
        NoiseSchedule.cosine(0)
    with pytest.raises(ValueError, match="0 < beta < 1"):
        NoiseSchedule("mine", [0.1, 1.0])


def test_posterior_is_bayes_rule_on_the_forward_process():
    """The posterior is proportional to q(x_{t-1}|x0) q(x_t|x_{t-1}); multiply the two normals on a grid."""
    schedule = LINEAR.respaced(10)
    x0, x_t, index = 0.7, -0.4, 6
    grid = torch.linspace(-6, 6, 200_001, dtype=torch.float64)
    before, beta = schedule.alphas_cumprod[index - 1], schedule.betas[index]
    log_density = (-(grid - before.sqrt() * x0) ** 2 / (2 * (1 - before))
                   - (x_t - (1 - beta).sqrt() * grid) ** 2 / (2 * beta))
    weights = log_density.softmax(0)
    true_mean = (weights * grid).sum()
    true_variance = (weights * (grid - true_mean) ** 2).sum()
    value = torch.tensor([[x0], [x_t]], dtype=torch.float64)
    mean, variance, log_variance = schedule.posterior(value[:1], value[1:], torch.tensor([index]))
    assert mean.item() == pytest.approx(true_mean.item(), abs=1e-9)
    assert variance.item() == pytest.approx(true_variance.item(), rel=1e-7)
    assert log_variance.exp().item() == pytest.approx(variance.item(), rel=1e-12)


def test_first_step_borrows_the_log_variance_of_the_second():
    x = torch.zeros(2, 1, dtype=torch.float64)
    _, variance, log_variance = LINEAR.posterior(x, x, torch.tensor([0, 1]))
    assert variance[0] == 0 and log_variance[0] == log_variance[1] == variance[1].log()


def test_predictions_of_x0_and_noise_invert_the_forward_process():
    generator = torch.Generator().manual_seed(0)
    x0, noise = torch.randn(2, 6, 4, 8, 8, generator=generator, dtype=torch.float64)
    t = torch.tensor([0, 1, 250, 500, 800, 999])
    x_t = LINEAR.add_noise(x0, t, noise)
    torch.testing.assert_close(LINEAR.predict_x0(x_t, t, noise), x0)
    torch.testing.assert_close(LINEAR.predict_eps(x_t, t, x0), noise)


def test_an_error_of_the_noise_grows_157_times_at_the_last_step():
    x_t, t = torch.zeros(1, 1, dtype=torch.float64), torch.tensor([999])
    one = torch.ones(1, 1, dtype=torch.float64)
    grown = LINEAR.predict_x0(x_t, t, one) - LINEAR.predict_x0(x_t, t, 0 * one)
    assert -grown.item() == pytest.approx(157.4, abs=0.05)


def test_learned_variance_runs_between_the_posterior_and_beta_in_logarithms():
    t = torch.tensor([0, 10, 999])
    x = torch.zeros(3, 1, dtype=torch.float64)
    low, high = LINEAR.posterior(x, x, t)[2], LINEAR.betas[t].log().view(3, 1)
    for v, expected in ((-1.0, low), (1.0, high), (0.0, (low + high) / 2), (3.0, 2 * high - low)):
        torch.testing.assert_close(LINEAR.log_variance("learned", t, x + v), expected)
    torch.testing.assert_close(LINEAR.log_variance("fixed_small", t, x), low)
    torch.testing.assert_close(LINEAR.log_variance("fixed_large", t, x)[1:], high[1:])


def test_half_precision_input_does_not_round_the_arithmetic():
    x0 = torch.ones(1, 4, dtype=torch.bfloat16)
    t = torch.tensor([998])
    x_t = LINEAR.add_noise(x0, t, torch.ones(1, 4))
    a = LINEAR.alphas_cumprod[998].item()
    assert x_t.dtype == torch.float32
    assert x_t[0, 0].item() == pytest.approx(math.sqrt(a) + math.sqrt(1 - a), abs=1e-7)


def test_tables_are_copied_to_a_device_once():
    schedule = NoiseSchedule.linear(1000)
    device = torch.device("meta")
    t, x = torch.zeros(2, dtype=torch.int64, device=device), torch.zeros(2, 4, device=device)
    schedule.add_noise(x, t, x)
    tables = schedule._on(device)
    schedule.predict_x0(x, t, x)
    assert schedule._on(device) is tables
