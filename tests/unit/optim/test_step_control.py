"""Predicted KL, measured KL, alpha, the budget and what is taken from it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw.optim.step_control import (
    StepControlError,
    choose_alpha,
    kl_rate,
    naive_kl,
    naive_variance,
    predicted_kl,
    rate_from_kl,
    ratio_step,
    scheduled_budget,
    subtract_mismatch,
    sum_kl,
    sum_logit_variance,
    update_mismatch,
)

F64 = torch.float64


def draw(contexts, vocab, seed=0, scale=1.0, dtype=F64):
    return (torch.randn(contexts, vocab, generator=torch.Generator().manual_seed(seed), dtype=F64) * scale).to(dtype)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 5), st.integers(1, 11), st.sampled_from([0.6, 1.0, 1.7]), st.integers(0, 99))
def test_variance_and_kl_equal_naive(contexts, vocab, temperature, seed):
    z, other = draw(contexts, vocab, seed, 3.0), draw(contexts, vocab, seed + 1)
    got = sum_logit_variance(z, other, temperature=temperature)
    torch.testing.assert_close(got, naive_variance(z, other, temperature), rtol=1e-11, atol=1e-12)
    got = sum_kl(z, z + other, temperature=temperature)
    torch.testing.assert_close(got, naive_kl(z, z + other, temperature), rtol=1e-11, atol=1e-12)


def test_variance_does_not_cancel_beside_a_large_mean():
    """A shift of all logits' derivatives changes no probability. In float32, with a mean 10,000 times the spread."""
    z, zdot = draw(20, 50, dtype=torch.float32), draw(20, 50, 1, dtype=torch.float32)
    shifted = zdot + 1e4
    exact = naive_variance(z, shifted.double())
    assert float(sum_logit_variance(z, shifted)) == pytest.approx(float(exact), rel=1e-4)
    exact = naive_variance((z + 1e4).double(), zdot)
    assert float(sum_logit_variance(z + 1e4, zdot)) == pytest.approx(float(exact), rel=1e-4)


@pytest.mark.parametrize("size", [1e-1, 1e-3, 1e-5])
def test_small_kl_does_not_cancel_in_float32(size):
    """Down to a KL of 5e-11, of logits whose difference is exact: from log-probabilities nothing would be left."""
    z = draw(30, 40, dtype=torch.float32).mul(256).round().div(256)
    step = draw(30, 40, 1).mul(2).round().to(torch.float32) * 2.0 ** round(math.log2(size))
    moved = (z.double() + step.double()).float()
    exact = naive_kl_of_differences(z, moved)
    assert float(sum_kl(z, moved)) == pytest.approx(exact, rel=2e-5)
    p, q = (torch.log_softmax(t, -1) for t in (z, moved))
    if size == 1e-5:
        assert abs(float((p.exp() * (p - q)).sum()) / exact - 1) > 0.5


def naive_kl_of_differences(z, moved):
    """KL in float64 from the differences' power series' head and tail: E[e^x - 1 - x] summed by expm1 of float64."""
    p = torch.softmax(z.double(), -1)
    x = moved.double() - z.double()
    x = x - (p * x).sum(-1, keepdim=True)
    terms = sum(x**n / math.factorial(n) for n in range(2, 16))
    return float((p * terms).sum(-1).log1p().sum())


def test_the_rate_predicts_the_measured_kl():
    """Logits linear in alpha: the measured KL over q alpha^2 tends to 1, and both estimates of q agree to 1 %."""
    z, zdot, contexts, temperature = draw(64, 50, 0, 3.0), draw(64, 50, 1), 64, 0.8
    q = kl_rate(sum_logit_variance(z, zdot, temperature=temperature), contexts, temperature=temperature)

    def measured(alpha):
        return float(sum_kl(z, z + alpha * zdot, temperature=temperature)) / contexts

    errors = [abs(measured(alpha) / predicted_kl(q, alpha) - 1) for alpha in (0.1, 0.01, 0.001)]
    assert errors[0] < 0.05 and errors[1] < errors[0] / 5 and errors[2] < errors[1] / 5  # odd order: linear in alpha
    for step in (0.2, 0.1, 0.05):
        both = rate_from_kl(measured(step), measured(-step), step)
        assert both == pytest.approx(q, rel=0.5 * step**2)  # one order better than one side
    assert rate_from_kl(measured(0.05), measured(-0.05), 0.05) == pytest.approx(q, rel=0.01)


def test_four_times_the_budget_halves_alpha():
    assert choose_alpha(8e-4, 2e-4) == pytest.approx(0.5, rel=1e-15)


@pytest.mark.parametrize("rate, budget, alpha", [
    (2e-4, 2e-4, 1.0), (2e-4 / 9, 2e-4, 3.0), (2e-4 / 16, 2e-4, 3.0), (0.0, 2e-4, 3.0), (5e-324, 2e-4, 3.0),
    (1e300, 1e-4, 1e-152), (1.0, 0.0, 0.0),
])
def test_alpha(rate, budget, alpha):
    assert choose_alpha(rate, budget) == pytest.approx(alpha, rel=1e-12)
    assert choose_alpha(rate, budget, alpha_max=0.25) == pytest.approx(min(alpha, 0.25), rel=1e-12)


def test_budget_schedules():
    cosine = dict(start=2e-4, final=2e-5, steps=100)
    assert scheduled_budget(0, **cosine) == 2e-4
    assert scheduled_budget(50, **cosine) == pytest.approx(1.1e-4, rel=1e-12)
    assert scheduled_budget(25, **cosine) == pytest.approx(2e-5 + 1.8e-4 * (1 + math.sqrt(0.5)) / 2, rel=1e-12)
    assert scheduled_budget(100, **cosine) == scheduled_budget(1000, **cosine) == pytest.approx(2e-5, rel=1e-12)
    budgets = [scheduled_budget(step, **cosine) for step in range(101)]
    assert budgets == sorted(budgets, reverse=True)
    assert scheduled_budget(77, schedule="constant", **cosine) == 2e-4
    for change, words in ((dict(steps=0), "--kl-budget-steps"), (dict(schedule="linear"), "--kl-budget-schedule")):
        with pytest.raises(ValueError, match=words):
            scheduled_budget(1, **(cosine | change))


def test_the_mismatch_is_taken_from_the_budget():
    average = update_mismatch(None, 1e-5)
    assert average == 1e-5
    average = update_mismatch(average, 4e-5)
    assert average == pytest.approx(1.9e-5)
    assert subtract_mismatch(2e-4, average) == pytest.approx(1.81e-4)
    assert subtract_mismatch(2e-4, 1.5e-4) == 1e-4  # the floor: half stays
    assert subtract_mismatch(2e-4, 1.5e-4, floor=0.1) == pytest.approx(5e-5)
    assert subtract_mismatch(2e-4, None) == subtract_mismatch(2e-4, 0.0) == subtract_mismatch(2e-4, -1e-6) == 2e-4


def test_update_ratio():
    assert ratio_step(100.0, 4.0, 6e-5) == pytest.approx(6e-5 * 10 / 2)
    assert ratio_step(100.0, 0.0, 6e-5) == 0.0
    assert ratio_step(1e-300, 1e-320, 1.0) > 0
    assert ratio_step(0.0, 4.0, 6e-5) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_refuses_the_step(bad):
    for call in (
        lambda: kl_rate(bad, 3), lambda: rate_from_kl(bad, 1e-6, 0.1), lambda: rate_from_kl(1e-6, bad, 0.1),
        lambda: choose_alpha(bad, 1e-4), lambda: choose_alpha(1e-4, bad), lambda: update_mismatch(0.1, bad),
        lambda: ratio_step(bad, 1.0, 1.0), lambda: ratio_step(1.0, bad, 1.0),
    ):  # fmt: skip
        with pytest.raises(StepControlError, match="The step is refused"):
            call()


def test_a_nan_in_one_logit_is_not_hidden():
    for where in (0, 1):
        pair = [draw(3, 5, dtype=torch.float32), draw(3, 5, 1, dtype=torch.float32)]
        pair[where][1, 2] = torch.nan
        for total in (sum_logit_variance(*pair), sum_kl(*pair)):
            with pytest.raises(StepControlError, match="nan"):
                kl_rate(total, 3)


def test_negative_rates_are_refused():
    with pytest.raises(StepControlError, match="negative"):
        choose_alpha(-1e-9, 1e-4)
    with pytest.raises(StepControlError, match="negative"):
        rate_from_kl(-1e-9, 1e-9, 0.1)
    assert update_mismatch(None, -1e-6) == -1e-6  # a sampled estimate may be


def test_refusals_that_name_the_flag():
    with pytest.raises(ValueError, match="--kl-probe-tokens"):
        kl_rate(0.0, 0)
    for step in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="--kl-probe-step"):
            rate_from_kl(1e-6, 1e-6, step)
    with pytest.raises(ValueError, match="--sampling-temperature"):
        sum_kl(draw(1, 2), draw(1, 2), temperature=0.0)
    with pytest.raises(ValueError, match="one shape"):
        sum_logit_variance(draw(1, 2), draw(2, 2))
