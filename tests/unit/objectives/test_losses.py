"""Token losses against autograd through the plain formula, and against overflow and NaN."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw.objectives import (
    ObjectiveConfig,
    estimate_kl,
    loss_statistics,
    sequence_log_ratio,
    token_policy_loss,
)

F64 = torch.float64


def plain_loss(p, old, advantage, mask, config, ref=None):
    """The formulas over a whole response, differentiated by autograd. Fine as long as nothing overflows."""
    log_ratio = p - old
    if config.importance_level == "sequence":
        log_ratio = ((log_ratio * mask).sum() / mask.sum().clamp(min=1)).expand_as(p)
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1 - config.clip_range_low, 1 + config.clip_range_high)
    loss = -torch.minimum(ratio * advantage, bounded * advantage)
    if config.kl_coefficient:
        d = ref - p
        loss = loss + config.kl_coefficient * {"k1": -d, "k2": d * d / 2, "k3": d.exp() - 1 - d}[config.kl_estimator]
    return loss * mask


def in_blocks(p, old, advantage, mask, config, ref, block):
    known = sequence_log_ratio(p, old, mask) if config.importance_level == "sequence" else None
    return torch.cat(
        [
            token_policy_loss(
                p[b], old[b], advantage, config=config, loss_mask=mask[b], sequence_log_ratio=known,
                ref_logprobs=None if ref is None else ref[b],
            ).loss
            for b in (slice(start, start + block) for start in range(0, len(p), block))
        ]
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 13),
    st.sampled_from([-1.7, -0.3, 0.0, 0.4, 2.0]),
    st.sampled_from(["token", "sequence"]),
    st.sampled_from([(0.2, 0.2), (0.1, 0.3), (3e-4, 4e-4), (1.0, 0.0)]),
    st.sampled_from([(0.0, "k3"), (0.1, "k1"), (0.1, "k2"), (0.1, "k3")]),
    st.integers(0, 10**6),
)
def test_blocks_equal_autograd_of_the_plain_formula(tokens, block, advantage, level, clip, kl, seed):
    generator = torch.Generator().manual_seed(seed)
    old, move, ref = torch.randn(3, tokens, generator=generator, dtype=F64)
    mask = (torch.rand(tokens, generator=generator) < 0.8).to(F64)
    weight = torch.rand((), generator=generator, dtype=F64)
    config = ObjectiveConfig(
        importance_level=level, clip_range_low=clip[0], clip_range_high=clip[1], kl_coefficient=kl[0],
        kl_estimator=kl[1],
    )  # fmt: skip
    dense = (old + 0.2 * move).requires_grad_()
    reference = (weight * plain_loss(dense, old, advantage, mask, config, ref)).sum()
    reference.backward()
    p = dense.detach().clone().requires_grad_()
    loss = (weight * in_blocks(p, old, advantage, mask, config, ref, block)).sum()
    loss.backward()
    torch.testing.assert_close(loss, reference, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(p.grad, dense.grad, rtol=1e-11, atol=1e-13)


def test_sequence_gradient_is_the_ratio_over_the_length():
    p = torch.tensor([-1.0, -2.0, -0.5], dtype=F64, requires_grad=True)
    old = torch.tensor([-1.1, -1.9, -0.6], dtype=F64)
    config = ObjectiveConfig(importance_level="sequence")
    (token_policy_loss(p, old, 1.0, config=config, sequence_log_ratio=sequence_log_ratio(p, old)).loss / 3).sum().backward()
    s = math.exp(0.1 / 3)
    assert p.grad.tolist() == pytest.approx([-s / 3] * 3, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("advantage, log_ratio", [(1.0, 200.0), (-1.0, -200.0), (0.0, 200.0), (0.0, -200.0)])
def test_overflow_on_a_clipped_token_stays_finite(dtype, level, advantage, log_ratio):
    p = torch.tensor([log_ratio - 1, log_ratio - 3], dtype=dtype, requires_grad=True)
    old = torch.tensor([-1.0, -3.0], dtype=dtype)
    config = ObjectiveConfig(importance_level=level)
    known = sequence_log_ratio(p, old) if level == "sequence" else None
    result = token_policy_loss(p, old, advantage, config=config, sequence_log_ratio=known)
    result.loss.sum().backward()
    bound = 1.2 if log_ratio > 0 else 0.8
    assert result.loss.tolist() == pytest.approx([-advantage * bound] * 2, rel=1e-6)
    assert p.grad.tolist() == [0.0, 0.0]
    assert result.clipped.tolist() == [advantage != 0.0] * 2


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [200.0, -200.0, float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_masked_token_reaches_neither_loss_nor_gradient(advantage, log_ratio, level, estimator):
    p = torch.tensor([-1.0 + log_ratio, -2.0], requires_grad=True)
    old = torch.tensor([-1.0, -2.1])
    mask = torch.tensor([0.0, 1.0])
    config = ObjectiveConfig(importance_level=level, kl_coefficient=0.1, kl_estimator=estimator)
    known = sequence_log_ratio(p, old, mask) if level == "sequence" else None
    result = token_policy_loss(
        p, old, advantage, config=config, loss_mask=mask, ref_logprobs=old, sequence_log_ratio=known
    )
    result.loss.sum().backward()
    assert result.loss[0] == 0 and p.grad[0] == 0 and result.kl[0] == 0 and not result.clipped[0]
    assert torch.isfinite(result.loss).all() and torch.isfinite(p.grad).all() and p.grad[1] != 0
    means = loss_statistics(result, mask).means()
    assert means["ratio_mean"] == pytest.approx(math.exp(0.1), rel=1e-6)
    assert means["nan_logprobs"] == int(math.isnan(log_ratio))


def test_an_unclipped_overflow_is_reported_as_infinite():
    p = torch.tensor([200.0], requires_grad=True)
    result = token_policy_loss(p, torch.tensor([0.0]), -1.0, config=ObjectiveConfig())
    result.loss.sum().backward()
    assert result.loss.item() == math.inf and p.grad.item() == math.inf and not result.clipped.item()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("where", ["logprobs", "old_logprobs"])
def test_nan_of_a_trained_token_is_reported(level, advantage, where):
    p = torch.tensor([float("nan") if where == "logprobs" else -1.0, -2.0], requires_grad=True)
    old = torch.tensor([-1.0 if where == "logprobs" else float("nan"), -2.1])
    known = sequence_log_ratio(p, old) if level == "sequence" else None
    result = token_policy_loss(p, old, advantage, config=ObjectiveConfig(importance_level=level), sequence_log_ratio=known)
    assert result.loss[0].isnan()
    result.loss.sum().backward()
    assert p.grad[0].isnan()


def test_nan_that_only_the_replay_sees_is_reported_at_sequence_level():
    p = torch.tensor([float("nan"), -2.0], requires_grad=True)
    config = ObjectiveConfig(importance_level="sequence")
    result = token_policy_loss(p, torch.tensor([-1.0, -2.0]), 1.0, config=config, sequence_log_ratio=0.0)
    result.loss.sum().backward()
    assert result.loss[0].isnan() and p.grad[0].isnan() and result.nan_logprobs == 1


def test_nan_of_the_reference_is_reported():
    p = torch.tensor([-1.0], requires_grad=True)
    for estimator in ("k1", "k2", "k3"):
        config = ObjectiveConfig(kl_coefficient=0.1, kl_estimator=estimator)
        result = token_policy_loss(p, p.detach(), 1.0, config=config, ref_logprobs=torch.tensor([float("nan")]))
        assert result.loss.isnan().all()


def test_first_update_has_ratio_one_and_kl_zero_exactly():
    p = torch.randn(9, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for level in ("token", "sequence"):
        config = ObjectiveConfig(importance_level=level, kl_coefficient=0.1)
        known = sequence_log_ratio(p, p.detach()) if level == "sequence" else None
        result = token_policy_loss(
            p, p.detach(), 0.5, config=config, ref_logprobs=p.detach(), sequence_log_ratio=known
        )
        means = loss_statistics(result).means()
        assert means["ratio_mean"] == 1.0 and means["ratio_max"] == 1.0
        assert means["kl"] == 0.0 and means["old_kl"] == 0.0 and means["clip_fraction"] == 0.0
        assert result.loss.tolist() == [-0.5] * 9


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_value_and_derivative_equal_autograd(estimator):
    p = torch.linspace(-4, 0, 7, dtype=F64).requires_grad_()
    ref = torch.linspace(-1, -3, 7, dtype=F64)
    d = ref - p
    formula = {"k1": -d, "k2": d * d / 2, "k3": d.exp() - 1 - d}[estimator]
    formula.sum().backward()
    value, slope = estimate_kl(p, ref, estimator)
    torch.testing.assert_close(value, formula.detach(), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(slope, p.grad, rtol=1e-13, atol=1e-14)
    assert not value.requires_grad


def test_expected_kl_gradients_are_those_documented():
    """Over a whole small vocabulary: k1 trains nothing, k2 is KL(pi || ref), k3 is KL(ref || pi)."""
    generator = torch.Generator().manual_seed(1)
    logits, ref_logits = torch.randn(2, 6, generator=generator, dtype=F64)
    logits.requires_grad_()
    logp, logq = torch.log_softmax(logits, 0), torch.log_softmax(ref_logits, 0)
    reverse = torch.autograd.grad((logp.exp() * (logp - logq)).sum(), logits, retain_graph=True)[0]
    forward = torch.autograd.grad((logq.exp() * (logq - logp)).sum(), logits, retain_graph=True)[0]
    for estimator, expected in (("k1", torch.zeros(6, dtype=F64)), ("k2", reverse), ("k3", forward)):
        _, slope = estimate_kl(logp, logq, estimator)
        expectation = torch.autograd.grad((logp.exp().detach() * slope * logp).sum(), logits, retain_graph=True)[0]
        torch.testing.assert_close(expectation, expected, rtol=1e-12, atol=1e-14)


def test_reference_without_coefficient_is_reported_and_not_trained():
    p = torch.tensor([-1.0, -2.0], requires_grad=True)
    config = ObjectiveConfig(kl_estimator="k1")
    # A reference so far away that its KL is infinite must not reach the loss as 0 * inf.
    result = token_policy_loss(p, p.detach(), 1.0, config=config, ref_logprobs=torch.tensor([-1.5, float("-inf")]))
    result.loss.sum().backward()
    assert result.kl.tolist() == [0.5, math.inf]
    assert result.loss.tolist() == [-1.0, -1.0] and p.grad.tolist() == [-1.0, -1.0]


def test_statistics_add_up_over_blocks():
    generator = torch.Generator().manual_seed(2)
    p, old, ref = torch.randn(3, 10, generator=generator, dtype=F64)
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 0, 1, 1, 1])
    config = ObjectiveConfig(kl_coefficient=0.1)

    def statistics(b):
        result = token_policy_loss(p[b], old[b], 1.0, config=config, loss_mask=mask[b], ref_logprobs=ref[b])
        return loss_statistics(result, mask[b])

    whole = statistics(slice(0, 10)).means()
    parts = statistics(slice(0, 3)) + statistics(slice(3, 3)) + statistics(slice(3, 10))
    assert parts.means() == pytest.approx(whole, rel=1e-12)
    log_ratio = (p - old)[mask.bool()]
    assert whole["clip_fraction"] == pytest.approx((log_ratio.exp() > 1.2).double().mean().item())
    assert whole["ratio_max"] == pytest.approx(log_ratio.exp().max().item())
    assert whole["old_kl"] == pytest.approx((log_ratio.exp() - 1 - log_ratio).mean().item())


def test_per_token_advantages_at_token_level():
    p = torch.tensor([-1.0, -2.0], requires_grad=True)
    result = token_policy_loss(p, p.detach(), torch.tensor([2.0, -3.0]), config=ObjectiveConfig())
    assert result.loss.tolist() == [-2.0, 3.0]


def test_empty_block_and_empty_mask():
    p = torch.zeros(0, requires_grad=True)
    result = token_policy_loss(p, torch.zeros(0), 1.0, config=ObjectiveConfig())
    result.loss.sum().backward()
    assert p.grad.shape == (0,) and loss_statistics(result).means()["ratio_mean"] == 0.0
    assert sequence_log_ratio(torch.ones(3), torch.zeros(3), torch.zeros(3)) == 0.0


@pytest.mark.parametrize(
    "config, arguments, words",
    [
        ({}, dict(logprobs=torch.zeros(2, 2)), "logprobs must be"),
        ({}, dict(logprobs=torch.zeros(2, dtype=torch.bfloat16)), "float32 or float64"),
        ({}, dict(old_logprobs=torch.zeros(3)), "old_logprobs must have"),
        ({}, dict(loss_mask=torch.zeros(3)), "loss_mask must have"),
        ({}, dict(ref_logprobs=torch.zeros(1)), "ref_logprobs must have"),
        ({}, dict(advantages=torch.zeros(3)), "advantages must be"),
        ({}, dict(sequence_log_ratio=0.0), "--importance-level sequence"),
        (dict(importance_level="sequence"), {}, "sequence_log_ratio beforehand"),
        (dict(importance_level="sequence"), dict(sequence_log_ratio=0.0, advantages=torch.zeros(2)), "one advantage"),
        (dict(kl_coefficient=0.1), {}, "--kl-coefficient"),
    ],
)
def test_refuses_inputs_that_do_not_fit(config, arguments, words):
    inputs = dict(logprobs=torch.zeros(2), old_logprobs=torch.zeros(2), advantages=1.0) | arguments
    with pytest.raises(ValueError, match=words):
        token_policy_loss(config=ObjectiveConfig(**config), **inputs)
    with pytest.raises(ValueError, match="--kl-estimator"):
        estimate_kl(torch.zeros(1), torch.zeros(1), "k4")
