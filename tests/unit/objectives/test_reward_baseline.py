"""The running mean that one response a prompt is compared with: exact arithmetic, any split over replicas, bits kept."""

import json
from fractions import Fraction
from functools import reduce
from operator import add

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw.objectives import ObjectiveConfig, RewardBaseline, compute_advantages
from longstraw.rollout.protocol import Sample
from longstraw.transaction.group import PromptGroup
from megatron.grpo.rollouts import set_advantages

SETTINGS = dict(group_size=1, advantage_estimator="running_mean", advantage_std_normalization=False)
CONFIG = ObjectiveConfig(**SETTINGS)
steps = st.lists(st.lists(st.integers(-8, 8).map(lambda n: n / 7), max_size=5), max_size=6)


@settings(max_examples=60, deadline=None)
@given(steps, st.sampled_from([1.0, 0.5, 0.9]))
def test_it_is_the_weighted_mean_of_all_rewards_so_far(steps, decay):
    baseline, known = RewardBaseline(), []
    for rewards in steps:
        baseline.update(rewards, decay=decay)
        if rewards:
            known = [(Fraction(decay) * weight, reward) for weight, reward in known]
            known += [(Fraction(1), Fraction(reward)) for reward in rewards]
    weight = sum(w for w, _ in known)
    assert baseline.count == pytest.approx(float(weight), rel=1e-14)
    assert baseline.value == pytest.approx(float(sum(w * r for w, r in known) / weight) if known else 0.0, abs=1e-14)


def test_the_first_step_compares_with_nothing_and_each_step_with_those_before():
    baseline = RewardBaseline()
    assert compute_advantages([0.75], CONFIG, baseline=baseline.value).tolist() == [0.75]
    baseline.update([0.75, 0.25])
    assert compute_advantages([0.75], CONFIG, baseline=baseline.value).tolist() == [0.25]
    assert compute_advantages([[1.0, 0.0]], CONFIG, baseline=baseline.value).tolist() == [[0.5, -0.5]]


def test_how_replicas_share_the_rewards_changes_no_bit():
    rewards = (torch.randn(64, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 1e3).tolist()
    found = set()
    for order in (rewards, rewards[::-1], rewards[1::2] + rewards[::2]):
        baseline = RewardBaseline(value=0.1, count=3.0)
        baseline.update(order, decay=0.9)
        found.add((baseline.value, baseline.count))
    assert len(found) == 1
    assert reduce(add, rewards) != reduce(add, rewards[::-1]), "these rewards do not show it"


def test_saved_values_bring_it_back_bit_for_bit():
    baseline, again = RewardBaseline(), RewardBaseline()
    baseline.update([0.1, 0.7, 1 / 3], decay=0.9)
    again.load_state_dict(json.loads(json.dumps(baseline.state_dict())))
    for one in (baseline, again):
        one.update([1 / 7], decay=0.9)
    assert baseline == again and baseline.value != 0.0


def test_a_reward_that_is_no_number_is_refused_and_changes_nothing():
    baseline = RewardBaseline(value=0.5, count=2.0)
    with pytest.raises(ValueError, match="finite"):
        baseline.update([1.0, float("nan")])
    assert (baseline.value, baseline.count) == (0.5, 2.0)
    with pytest.raises(ValueError, match="finite"):
        compute_advantages([float("inf")], CONFIG)


def open_group(*rewards, kept=None, ends="stop"):
    samples = [
        Sample(prompt_id="p", token_ids=(1,), logprobs=(0.0,), finish_reason=ends, weight_version=0) for _ in rewards
    ]
    return PromptGroup("p", torch.zeros(1, 1), samples, rewards=list(rewards), kept=kept or [True] * len(rewards))


def test_one_response_takes_part_unless_it_has_no_reward_or_is_truncated():
    for group, masked, advantages, kept in (
        (open_group(1.0), False, [0.75], [True]),
        (open_group(1.0, kept=[False]), False, [0.0], [False]),
        (open_group(1.0, ends="length"), True, [0.75], [False]),
        (open_group(0.5, 0.5), False, [0.25, 0.25], [True, True]),  # equal rewards are signal here
    ):
        set_advantages(group, CONFIG, mask_truncated=masked, baseline=0.25)
        assert group.advantages == advantages and group.kept == kept
    lonely = open_group(1.0, 0.0, kept=[True, False])
    set_advantages(lonely, ObjectiveConfig(group_size=2), mask_truncated=False)
    assert lonely.kept == [False, False]


@pytest.mark.parametrize("settings, words", [
    (dict(group_size=1), ["--group-size 1", "--advantage-estimator group"]),
    (dict(group_size=1, advantage_estimator="leave_one_out", advantage_std_normalization=False),
     ["--group-size 1", "--advantage-estimator leave_one_out"]),
    (SETTINGS | dict(advantage_std_normalization=True),
     ["--advantage-estimator running_mean", "--no-advantage-std-normalization"]),
    (SETTINGS | dict(group_filter="drop_uniform"), ["--group-filter drop_uniform", "--advantage-estimator running_mean"]),
    (SETTINGS | dict(reward_baseline_decay=0.0), ["--reward-baseline-decay"]),
    (SETTINGS | dict(reward_baseline_decay=float("nan")), ["--reward-baseline-decay"]),
    (SETTINGS | dict(group_size=0), ["--group-size must be at least 1"]),
])
def test_what_it_excludes_is_named(settings, words):
    with pytest.raises(ValueError) as error:
        ObjectiveConfig(**settings)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)
