import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dit_repro.stability.beyond import adam_spike, clip_outcomes, scaled_training
from dit_repro.stability.quadratic import QuadraticLab, descend, minimize

SCRIPT_STEP = re.search(r"const step = \(x, rate\) => ([^;]+);", QuadraticLab()._repr_html_())[1]


def test_the_lab_reaches_the_values_of_its_source_exactly():
    assert descend(0.5, 2) == [1.0, 0.5, 0.25]
    assert descend(2.5, 2) == [1.0, -1.5, 2.25]


@given(rate=st.floats(0, 4), start=st.floats(-10, 10))
def test_the_page_computes_what_python_computes(rate, start):
    # Both languages read this expression, and both compute it in IEEE double precision.
    assert eval(SCRIPT_STEP, {"x": start, "rate": rate}) == descend(rate, 1, start)[1]


def test_the_page_loads_nothing_and_labels_its_controls():
    page = QuadraticLab()._repr_html_()
    assert "%" not in re.sub(r"\d%", "", page.split("</style>")[1]) and not re.search(r"https?:|src=|import\(", page)
    assert page.count("<button") == 4 and 'aria-live="polite"' in page and page.count("<label>") == 2
    assert "1.0, -1.5, 2.25" in page   # for a reader without scripts


def test_the_widget_steps_and_resets_without_losing_values():
    rate, guess, buttons, shown = QuadraticLab().widget().children
    rate.value = 2.5
    guess.value = "-1.5"
    step, reset = buttons.children
    step.click()
    step.click()
    assert "x after step 1: -1.5 (predicted -1.5)" in shown.value and "x after step 2: 2.25" in shown.value
    reset.click()
    assert shown.value == "x after step 0: 1.0"


@pytest.mark.parametrize("rate, converges", [(1.9, True), (2.1, False)])
def test_plain_descent_converges_below_a_rate_of_two_and_momentum_below_two_times_one_plus_beta(rate, converges):
    assert (abs(minimize(lambda p: torch.optim.SGD(p, rate), 300)[-1]) < 1e-3) == converges
    scaled = rate * 1.9   # 2 (1 + 0.9) = 3.8
    assert (abs(minimize(lambda p: torch.optim.SGD(p, scaled, momentum=0.9), 300)[-1]) < 1e-3) == converges


def test_adam_moves_by_a_bounded_amount_however_large_the_gradient():
    correction = (1 - 0.999**2001) ** 0.5   # of the second moment, which is not yet full
    for ratio in (1e4, 1e9):
        assert max(map(abs, adam_spike(ratio, after=1))) == pytest.approx(correction * 0.1 / 0.001**0.5, rel=1e-3)
    assert max(map(abs, adam_spike(1e6, betas=(0.9, 0.95), num_steps=200))) == pytest.approx(0.1 / 0.05**0.5, rel=1e-3)
    assert max(map(abs, adam_spike(1e6, clip_norm=1.0, num_steps=200))) < 0.25


def test_clipping_scales_a_finite_gradient_and_repairs_no_other():
    table = clip_outcomes().set_index("last gradient")
    assert table["finite after"].to_dict() == {"finite": 10, "finite, large": 10, "infinite": 9, "NaN": 0}
    assert table.loc["finite", "the other nine"] == pytest.approx(10**-0.5, rel=1e-4)


def test_a_skipped_step_halves_the_scale_and_leaves_the_weight():
    rows = scaled_training(lambda step: step in (3, 4), num_steps=8)
    assert rows["skipped"].tolist() == [False, False, True, True, False, False, False, False]
    assert rows["scale"].iloc[-1] == 2.0**14 and rows["loss"].iloc[2] == rows["loss"].iloc[4]
    assert scaled_training(lambda step: True)["loss"].nunique() == 1
