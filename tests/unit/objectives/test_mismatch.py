"""Mismatch of sampler and trainer: values worked by hand in float64, bounds, overflow, NaN, and sums over ranks of none."""

import math

import pytest
import torch

from longstraw.objectives.mismatch import (
    MismatchConfig, all_reduce_mismatch, exceeds_bound, importance_weights, log_ratio, mismatch_statistics,
)

F64 = torch.float64
# Probabilities 1/2, 1/4, 3/4 by the trainer and 1/4, 1/2, 3/4 by the sampler: ratios 2, 1/2 and 1.
TRAINER = torch.tensor([0.5, 0.25, 0.75], dtype=F64).log()
ROLLOUT = torch.tensor([0.25, 0.5, 0.75], dtype=F64).log()


def ratio(*factors: float) -> torch.Tensor:
    return torch.tensor(factors, dtype=F64).log()


def test_the_log_ratio_is_trainer_minus_sampler():
    torch.testing.assert_close(log_ratio(TRAINER, ROLLOUT), ratio(2.0, 0.5, 1.0), rtol=0, atol=1e-15)
    wide = log_ratio(TRAINER.float().requires_grad_(), ROLLOUT.float())
    assert wide.dtype == F64 and not wide.requires_grad
    for trainer, rollout in ((TRAINER, ROLLOUT[:2]), (TRAINER[None], ROLLOUT[None])):
        with pytest.raises(ValueError, match="the trainer scores"):
            log_ratio(trainer, rollout)


@pytest.mark.parametrize("level, cap, expected", [
    ("token", 4.0, [2.0, 0.5, 1.0]),
    ("token", 1.5, [1.5, 0.5, 1.0]),
    ("token", 0.25, [0.25, 0.25, 0.25]),
    ("sequence", 4.0, [1.0, 1.0, 1.0]),  # 2 x 1/2 x 1
    ("sequence", 0.75, [0.75, 0.75, 0.75]),
])  # fmt: skip
def test_weights_by_hand(level, cap, expected):
    weights = importance_weights(log_ratio(TRAINER, ROLLOUT), MismatchConfig(rollout_is=level, rollout_is_cap=cap))
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=F64), rtol=1e-15, atol=0)
    assert weights.max() <= cap and not weights.requires_grad


def test_a_sequence_weight_is_the_product():
    weights = importance_weights(ratio(2.0, 3.0), MismatchConfig(rollout_is="sequence", rollout_is_cap=100.0))
    torch.testing.assert_close(weights, torch.tensor([6.0, 6.0], dtype=F64), rtol=1e-14, atol=0)
    assert importance_weights(ratio(2.0, 3.0), MismatchConfig()) is None


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_far_ratios_stay_finite(level):
    far = torch.tensor([200.0, 1e4, -1e4], dtype=F64)
    config = MismatchConfig(rollout_is=level)
    weights, found = importance_weights(far, config), mismatch_statistics(far, config)
    assert torch.isfinite(weights).all() and weights.max() <= 2.0 and weights.min() >= 0.0
    assert all(math.isfinite(value) for value in found.means(config).values())


def test_equal_log_probabilities_weigh_exactly_one():
    for level in ("token", "sequence"):
        config = MismatchConfig(rollout_is=level, rollout_is_cap=1.0)
        assert torch.equal(importance_weights(log_ratio(TRAINER, TRAINER), config), torch.ones(3, dtype=F64))
        means = mismatch_statistics(log_ratio(TRAINER, TRAINER), config).means(config)
        assert means == {
            "rollout_log_ratio_mean": 0.0, "rollout_log_ratio_max": 0.0, "rollout_kl": 0.0, "rollout_is_mean": 1.0,
            "rollout_is_capped": 0.0,
        }


def test_statistics_by_hand():
    config = MismatchConfig(rollout_is="token", rollout_is_cap=1.5)
    found = mismatch_statistics(ratio(2.0, 0.5, 1.0), config) + mismatch_statistics(ratio(0.25), config)
    means, log2 = found.means(config), math.log(2.0)
    assert means["rollout_log_ratio_mean"] == pytest.approx(-2 * log2 / 4, rel=1e-14)
    assert means["rollout_log_ratio_max"] == pytest.approx(2 * log2, rel=1e-14)
    # k3 = r - 1 - log r: 1 - log2, -1/2 + log2, 0, -3/4 + 2 log2
    assert means["rollout_kl"] == pytest.approx((2 * log2 - 0.25) / 4, rel=1e-13)
    assert means["rollout_is_mean"] == pytest.approx((1.5 + 0.5 + 1.0 + 0.25) / 4, rel=1e-14)
    assert means["rollout_is_capped"] == 0.25
    assert found.estimate_kl() == pytest.approx(2 * log2 / 4, rel=1e-14)
    assert set(found.means(MismatchConfig())) == {"rollout_log_ratio_mean", "rollout_log_ratio_max", "rollout_kl"}


def test_the_estimate_is_the_kl_in_expectation():
    """KL of two distributions over three tokens, by summing over what the sampler draws."""
    trainer, rollout = torch.tensor([0.5, 0.3, 0.2], dtype=F64), torch.tensor([0.2, 0.3, 0.5], dtype=F64)
    exact = (rollout * (rollout / trainer).log()).sum().item()
    parts = [mismatch_statistics(ratio((t / r).item()), MismatchConfig()) for t, r in zip(trainer, rollout)]
    k3 = sum(r.item() * part.means(MismatchConfig())["rollout_kl"] for r, part in zip(rollout, parts))
    k1 = sum(r.item() * part.estimate_kl() for r, part in zip(rollout, parts))
    assert k3 == pytest.approx(exact, rel=1e-13) and k1 == pytest.approx(exact, rel=1e-13)


def test_a_response_is_masked_by_its_mean_distance():
    config = MismatchConfig(rollout_mask_above=0.5)
    distance = torch.tensor([1.0, -1.0, 0.25, 0.0], dtype=F64)  # mean of |d| 0.5625, of d 0.0625
    assert exceeds_bound(distance, config) and not exceeds_bound(distance / 2, config)
    assert not exceeds_bound(torch.tensor([0.5, -0.5], dtype=F64), config)  # at the bound
    assert not exceeds_bound(distance * 100, MismatchConfig())


def test_a_nan_is_reported_and_not_hidden():
    broken = torch.tensor([0.1, math.nan], dtype=F64)
    assert not exceeds_bound(broken, MismatchConfig(rollout_mask_above=0.01))
    for level in ("token", "sequence"):
        config = MismatchConfig(rollout_is=level)
        assert importance_weights(broken, config).isnan().any()
        assert math.isnan(mismatch_statistics(broken, config).means(config)["rollout_kl"])


def test_nothing_adds_up_to_nothing():
    none = all_reduce_mismatch([], None, device=torch.device("cpu"))
    assert none.means(MismatchConfig()) == {} and none.estimate_kl() is None
    one = mismatch_statistics(ratio(2.0), MismatchConfig())
    assert all_reduce_mismatch([one], None, device=torch.device("cpu")) == one + none


@pytest.mark.parametrize("settings, flag", [
    (dict(rollout_is="tokens"), "--rollout-is"), (dict(rollout_is_cap=0.0), "--rollout-is-cap"),
    (dict(rollout_is_cap=math.inf), "--rollout-is-cap"), (dict(rollout_is_cap=math.nan), "--rollout-is-cap"),
    (dict(rollout_mask_above=0.0), "--rollout-mask-above"), (dict(rollout_mask_above=math.nan), "--rollout-mask-above"),
])  # fmt: skip
def test_what_cannot_be_meant_is_refused(settings, flag):
    with pytest.raises(ValueError, match=flag):
        MismatchConfig(**settings)
