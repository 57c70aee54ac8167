"""Group advantages against NumPy-like formulas in exact arithmetic, uniform groups, and the group filter."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw.objectives import (
    ObjectiveConfig,
    UniformGroupsError,
    collect_groups,
    compute_advantages,
    group_advantages,
    is_uniform,
    keeps_group,
    leave_one_out_advantages,
)

rewards_lists = st.lists(st.integers(-8, 8).map(lambda n: n / 7), min_size=2, max_size=9)
DROP = ObjectiveConfig(group_filter="drop_uniform", group_filter_retries=2)


@settings(max_examples=60, deadline=None)
@given(rewards_lists)
def test_group_advantages_equal_exact_arithmetic(rewards):
    exact = [Fraction(r) for r in rewards]
    mean = sum(exact) / len(exact)
    centred = [r - mean for r in exact]
    assert group_advantages(rewards, std_normalization=False).tolist() == pytest.approx(
        [float(c) for c in centred], abs=1e-15
    )
    variance = float(sum(c * c for c in centred) / (len(exact) - 1))
    expected = [0.0] * len(exact) if len(set(rewards)) == 1 else [float(c) / variance**0.5 for c in centred]
    assert group_advantages(rewards, std_normalization=True).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-13)


@settings(max_examples=60, deadline=None)
@given(rewards_lists)
def test_leave_one_out_equals_exact_arithmetic(rewards):
    exact = [Fraction(r) for r in rewards]
    expected = [float(r - (sum(exact) - r) / (len(exact) - 1)) for r in exact]
    assert leave_one_out_advantages(rewards).tolist() == pytest.approx(expected, abs=1e-14)


@settings(max_examples=60, deadline=None)
@given(st.floats(-1e6, 1e6), st.integers(2, 33), st.booleans())
def test_uniform_groups_are_exactly_zero(reward, size, as_float32):
    rewards = torch.full((size,), reward, dtype=torch.float32 if as_float32 else torch.float64)
    for advantages in (
        group_advantages(rewards, std_normalization=True),
        group_advantages(rewards, std_normalization=False),
        leave_one_out_advantages(rewards),
    ):
        assert torch.equal(advantages, torch.zeros(size, dtype=torch.float64))


def test_seven_times_seven_tenths_is_exactly_zero():
    assert group_advantages([0.7] * 7, std_normalization=True).tolist() == [0.0] * 7
    assert group_advantages(torch.full((7,), 0.7), std_normalization=True).tolist() == [0.0] * 7


def test_rewards_that_differ_by_rounding_only_are_uniform():
    # A weighted sum of rewards, added up in another order for one response.
    rewards = [0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.1 + 0.2 + 0.3]
    assert rewards[0] != rewards[1]
    assert bool(is_uniform(rewards))
    assert group_advantages(rewards, std_normalization=True).tolist() == [0.0] * 3
    assert leave_one_out_advantages(rewards).tolist() == [0.0] * 3
    assert not bool(is_uniform([1.0, 1.0 + 1e-4]))


def test_leave_one_out_of_an_otherwise_uniform_group():
    for rewards in ([0.35] * 7 + [0.0], torch.tensor([0.35] * 7 + [0.0])):
        last = leave_one_out_advantages(rewards)[-1].item()
        assert last == pytest.approx(-0.35, abs=1e-7)


def test_batch_of_groups_equals_groups_one_by_one():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.5], [0.7] * 4, [0.0, 0.0, 0.0, 1.0]])
    for config in (
        ObjectiveConfig(),
        ObjectiveConfig(advantage_std_normalization=False),
        ObjectiveConfig(advantage_estimator="leave_one_out", advantage_std_normalization=False),
    ):
        together = compute_advantages(rewards, config)
        assert torch.equal(together, torch.stack([compute_advantages(group, config) for group in rewards]))


def test_config_names_the_estimator():
    rewards = [1.0, 0.0, 0.0]
    loo = ObjectiveConfig(advantage_estimator="leave_one_out", advantage_std_normalization=False)
    assert compute_advantages(rewards, loo).tolist() == pytest.approx([1.0, -0.5, -0.5])
    plain = ObjectiveConfig(advantage_std_normalization=False)
    assert compute_advantages(rewards, plain).tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert compute_advantages(rewards, ObjectiveConfig()).tolist() == pytest.approx([2 / 3**0.5, -(3**-0.5), -(3**-0.5)])


@pytest.mark.parametrize("bad", [[1.0, float("nan")], [1.0, float("inf")]])
def test_refuses_rewards_that_are_no_numbers(bad):
    for function in (leave_one_out_advantages, is_uniform, lambda r: group_advantages(r, std_normalization=True)):
        with pytest.raises(ValueError, match="finite"):
            function(bad)


def test_refuses_groups_too_small_to_compare():
    with pytest.raises(ValueError, match="at least 2"):
        group_advantages([1.0], std_normalization=False)
    with pytest.raises(ValueError, match="at least one"):
        is_uniform([])


def test_filter_keeps_or_drops_a_group_whole():
    assert keeps_group([1, 0, 0, 0], DROP)
    assert not keeps_group([0.5] * 4, DROP)
    assert keeps_group([0.5] * 4, ObjectiveConfig())
    group = {"outcomes": [1, 0, 0, 0], "responses": ["a", "b", "c", "d"]}
    (kept,) = collect_groups(lambda missing, attempt: [group], lambda g: g["outcomes"], 1, DROP)
    assert kept["responses"] == ["a", "b", "c", "d"]


def test_filter_judges_the_outcome_and_not_the_shaped_reward():
    # All four wrong, with length penalties that differ: nothing to learn from the task.
    group = {"outcomes": [0.0] * 4, "shaped": [-0.1, -0.2, -0.3, -0.4]}
    with pytest.raises(UniformGroupsError):
        collect_groups(lambda missing, attempt: [group], lambda g: g["outcomes"], 1, DROP)


def test_dropped_groups_are_replaced_and_kept_ones_stay():
    rounds = [[[1, 0], [0, 0], [1, 1]], [[0, 0], [0, 1]], [[1, 0]]]
    asked = []

    def sample(missing, attempt):
        asked.append((missing, attempt))
        return rounds[attempt]

    kept = collect_groups(sample, lambda g: g, 3, DROP)
    assert kept == [[1, 0], [0, 1], [1, 0]]
    assert asked == [(3, 0), (2, 1), (1, 2)]


def test_retries_are_bounded_and_the_message_says_what_to_do():
    attempts = []

    def sample(missing, attempt):
        attempts.append(attempt)
        return [[0.5] * 4] * missing

    with pytest.raises(UniformGroupsError, match="(?s)3 attempts.*--group-size.*--group-filter-retries"):
        collect_groups(sample, lambda g: g, 2, DROP)
    assert attempts == [0, 1, 2]


def test_goes_on_with_fewer_groups_when_retries_run_out():
    kept = collect_groups(lambda missing, attempt: [[1, 0]] + [[0, 0]] * (missing - 1), lambda g: g, 5, DROP)
    assert kept == [[1, 0]] * 3


def test_a_complete_rank_still_takes_part_while_another_looks():
    # Two data-parallel ranks in lockstep: rank 0 is complete at once, rank 1 never finds a group.
    missing_of_the_other = iter([1, 1, 1])
    asked = []

    def sample(missing, attempt):
        asked.append(missing)
        return [[1, 0]] * missing

    kept = collect_groups(sample, lambda g: g, 1, DROP, sum_over_dp=lambda count: count + next(missing_of_the_other, 0))
    assert kept == [[1, 0]] and asked == [1, 0, 0]
    # And rank 1: it keeps nothing and does not stop the step, since rank 0 has a group.
    counts = iter([0, 0, 0, 1])
    assert collect_groups(lambda m, a: [[0, 0]] * m, lambda g: g, 1, DROP, sum_over_dp=lambda c: c + next(counts)) == []


def test_refuses_another_number_of_groups_than_asked():
    with pytest.raises(ValueError, match="2 groups were asked for and 3"):
        collect_groups(lambda missing, attempt: [[1, 0]] * 3, lambda g: g, 2, DROP)
