"""Importance weights and masks in the exact replay, on real modules, against dense autograd with the weights as constants."""

import dataclasses

import pytest
import torch
from test_whole_step import ADVANTAGES, dense_logprobs, open_group

from longstraw.objectives.config import ObjectiveConfig
from longstraw.objectives.mismatch import MismatchConfig
from longstraw.patches.float64 import lift_float64
from longstraw.transaction.step import Step
from tests.support.dense import compare_gradients, take_gradients
from tests.support.models import get_small_hybrid, one_rank

LENGTHS = (5, 1, 4)
MOVES = (0.4, -0.2, 0.05)  # how far the sampler's log-probabilities of each response lie above the trainer's


def sampled_otherwise(pair, moves=MOVES):
    """A group whose sampler gave each token of response i a log-probability moves[i] higher, alternately also lower."""
    drawn, group = open_group(pair, LENGTHS, perturb=0.0)
    trainers, group.old_logprobs = group.old_logprobs, None
    sampled = [
        row + move * torch.tensor([1.0, -0.5]).double().repeat(3)[: len(row)] for row, move in zip(trainers, moves)
    ]
    group.samples = [
        dataclasses.replace(sample, logprobs=tuple(row.tolist())) for sample, row in zip(group.samples, sampled)
    ]
    return drawn, group, sampled


def dense_step(pair, drawn, sampled, config, weigh, kept=(True, True, True)):
    pair.plain.zero_grad()
    total, tokens = 0.0, sum(len(r) for r, k in zip(drawn.responses, kept) if k)
    with lift_float64():
        for response, rollout, advantage, keep in zip(drawn.responses, sampled, ADVANTAGES, kept):
            if not keep:
                continue
            new = dense_logprobs(pair, drawn.prompt, response)
            ratio = (new - new.detach()).exp()  # 1, with the gradient of the log-probability
            divisor = tokens if config.loss_aggregation == "token" else sum(kept) * len(new)
            loss = (weigh(new.detach() - rollout) * -ratio * advantage).sum()
            loss = loss * torch.tensor(1 / divisor, dtype=torch.float32).double()
            loss.backward()
            total += loss.item()
    return total, take_gradients(pair.plain)


def replay(pair, group, config, mismatch, together=1, block=2):
    step = Step(
        pair.engine(response_block_size=block), config, dp=one_rank().dp, responses_together=together, mismatch=mismatch
    )
    pair.model.zero_grad()
    with lift_float64():
        masked = 0 if mismatch.rollout_mask_above is None else step.mask_mismatched([group])
        result = step.replay([group], step.count_terms([group]))
    return result, take_gradients(pair.model), masked


GSPO = ObjectiveConfig(importance_level="sequence", loss_aggregation="sequence")
CASES = {
    "token": (ObjectiveConfig(), MismatchConfig(rollout_is="token", rollout_is_cap=1.1), lambda d: d.exp().clamp(max=1.1)),
    "sequence": (
        ObjectiveConfig(), MismatchConfig(rollout_is="sequence", rollout_is_cap=1.1),
        lambda d: d.sum().exp().clamp(max=1.1).expand_as(d),
    ),
    "gspo": (
        GSPO, MismatchConfig(rollout_is="sequence", rollout_is_cap=1.1), lambda d: d.sum().exp().clamp(max=1.1).expand_as(d)
    ),
    "none": (ObjectiveConfig(), MismatchConfig(), torch.ones_like),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("together, block", [(1, 2), (3, 64)])
def test_weighed_replay_equals_dense_autograd(name, together, block):
    config, mismatch, weigh = CASES[name]
    pair = get_small_hybrid()
    drawn, group, sampled = sampled_otherwise(pair)
    loss, expected = dense_step(pair, drawn, sampled, config, weigh)
    result, found, _ = replay(pair, group, config, mismatch, together, block)
    error, _ = compare_gradients(found, expected)
    assert error <= 1e-12 and result.loss == pytest.approx(loss, rel=1e-12)
    means = result.statistics.means()
    assert means["ratio_mean"] == 1.0 and means["old_kl"] == 0.0, means
    if name != "none":  # a control: the weights are seen
        assert compare_gradients(found, dense_step(pair, drawn, sampled, config, torch.ones_like)[1])[0] > 1e-3


def test_the_group_knows_how_far_its_sampler_was():
    pair = get_small_hybrid()
    _, group, _ = sampled_otherwise(pair)
    group.kept[1] = False
    replay(pair, group, ObjectiveConfig(), MismatchConfig())
    # d of a token is minus its move: response 0 -0.4, 0.2, -0.4, 0.2, -0.4, response 2 -0.05, 0.025, -0.05, 0.025
    means = group.mismatch.means(MismatchConfig())
    assert group.mismatch.num_tokens == 9
    assert means["rollout_log_ratio_mean"] == pytest.approx((-0.8 - 0.05) / 9, abs=1e-12)
    assert means["rollout_log_ratio_max"] == pytest.approx(0.4, abs=1e-12)


@pytest.mark.parametrize("alive", [False, True])
def test_a_masked_response_leaves_loss_and_divisor(alive):
    pair = get_small_hybrid()
    drawn, group, sampled = sampled_otherwise(pair)  # mean |d|: 0.32, 0.2, 0.0375
    loss, expected = dense_step(pair, drawn, sampled, ObjectiveConfig(), torch.ones_like, kept=(False, True, True))
    if alive:
        with lift_float64():
            group.state = Step(pair.engine(), ObjectiveConfig(), dp=one_rank().dp).capture(group.prompt)
    result, found, masked = replay(pair, group, ObjectiveConfig(), MismatchConfig(rollout_mask_above=0.25))
    error, _ = compare_gradients(found, expected)
    assert error <= 1e-12 and result.loss == pytest.approx(loss, rel=1e-12)
    assert masked == 1 and group.kept == [False, True, True] and int(result.statistics.num_tokens) == 5
    means = result.statistics.means()
    assert means["ratio_mean"] == 1.0 and means["old_kl"] == 0.0, means


def test_nothing_left_is_nothing_trained():
    pair = get_small_hybrid()
    _, group, _ = sampled_otherwise(pair)
    step = Step(pair.engine(), ObjectiveConfig(), dp=one_rank().dp, mismatch=MismatchConfig(rollout_mask_above=1e-3))
    with lift_float64():
        assert step.mask_mismatched([group]) == 3 and step.count_terms([group]).num_tokens == 0
        assert step.mask_mismatched([group]) == 0  # nothing is scored twice


def test_of_several_groups_no_state_stays_alive():
    pair = get_small_hybrid()
    groups = [sampled_otherwise(pair)[1] for _ in range(2)]
    step = Step(pair.engine(), ObjectiveConfig(), dp=one_rank().dp, mismatch=MismatchConfig(rollout_mask_above=0.25))
    with lift_float64():
        assert step.mask_mismatched(groups) == 2
    assert [group.state for group in groups] == [None, None]
