import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.grpo.prompt_order import PromptOrder, permute

SIZES = st.integers(1, 23)


@given(num_prompts=SIZES, seed=st.integers(0, 99), epoch=st.integers(0, 9))
@settings(max_examples=30)
def test_an_epoch_is_a_permutation_fixed_by_seed_and_epoch(num_prompts, seed, epoch):
    random.seed()  # the state of no random generator may matter
    order = permute(num_prompts, seed=seed, epoch=epoch)
    assert sorted(order) == list(range(num_prompts))
    assert order == permute(num_prompts, seed=seed, epoch=epoch)


def test_orders_differ_between_seeds_and_epochs_and_never_change():
    orders = [tuple(permute(50, seed=seed, epoch=epoch)) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9
    # A position saved today must mean the same prompts in any later version.
    assert permute(8, seed=0, epoch=0) == [4, 1, 5, 0, 2, 7, 3, 6]


@given(num_prompts=SIZES, counts=st.lists(st.integers(1, 23), min_size=1, max_size=8), shuffle=st.booleans())
@settings(max_examples=40)
def test_steps_run_through_whole_epochs_one_after_another(num_prompts, counts, shuffle):
    order = PromptOrder(num_prompts, seed=3, shuffle=shuffle)
    taken = [index for count in counts for index in order.take(min(count, num_prompts))]
    for epoch, start in enumerate(range(0, len(taken), num_prompts)):
        whole = permute(num_prompts, seed=3, epoch=epoch) if shuffle else list(range(num_prompts))
        part = taken[start : start + num_prompts]
        assert part == whole[: len(part)]
    assert order.epoch * num_prompts + order.position == len(taken)


@given(
    num_prompts=SIZES,
    count=st.integers(1, 23),
    before=st.integers(0, 5),
    dp_before=st.integers(1, 5),
    dp_after=st.integers(1, 5),
)
@settings(max_examples=40)
def test_resume_continues_exactly_also_at_another_dp_size(num_prompts, count, before, dp_before, dp_after):
    count = min(count, num_prompts)
    uninterrupted = PromptOrder(num_prompts, seed=1)
    expected = [uninterrupted.take(count) for _ in range(before + 4)]

    ranks = [PromptOrder(num_prompts, seed=1) for _ in range(dp_before)]
    for step in range(before):
        shares = [order.take_shard(count, dp_rank=rank, dp_size=dp_before) for rank, order in enumerate(ranks)]
        assert sorted(sum(shares, [])) == sorted(expected[step])
    state = json.loads(json.dumps(ranks[-1].state_dict()))
    assert all(order.state_dict() == state for order in ranks)

    resumed = [PromptOrder(num_prompts, seed=1) for _ in range(dp_after)]
    for order in resumed:
        order.load_state_dict(state)
    for step in range(before, before + 4):
        shares = [order.take_shard(count, dp_rank=rank, dp_size=dp_after) for rank, order in enumerate(resumed)]
        assert [shares[place % dp_after][place // dp_after] for place in range(count)] == expected[step]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_more_than_an_epoch_at_once():
    """Resampling for dropped groups may ask for more prompts than there are: the next epochs follow."""
    order, steps = PromptOrder(3, seed=1), PromptOrder(3, seed=1)
    assert order.take(8) == [index for _ in range(8) for index in steps.take(1)]
    assert order.state_dict() == steps.state_dict() and order.epoch == 2


def test_refusals():
    with pytest.raises(ValueError, match="no prompts"):
        PromptOrder(0)
    order = PromptOrder(5, seed=1, fingerprint="abc")
    with pytest.raises(ValueError, match="cannot take 0 prompts"):
        order.take(0)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank {rank} is not in a group of 2"):
            order.take_shard(2, dp_rank=rank, dp_size=2)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_prompts": 6}, "num_prompts 6 then and 5 now"),
        ({"seed": 2}, "seed 2 then and 1 now"),
        ({"shuffle": False}, "shuffle False then and True now"),
        ({"fingerprint": "xyz"}, "fingerprint 'xyz' then and 'abc' now"),
        ({"position": 6}, "epoch 0, position 6"),
        ({"epoch": -1}, "epoch -1"),
        ({"other": 1}, "holds .*other"),
    ],
)
def test_a_saved_position_is_never_applied_to_another_order(change, sentence):
    order = PromptOrder(5, seed=1, fingerprint="abc")
    order.take(3)
    before = order.state_dict()
    with pytest.raises(ValueError, match=sentence):
        order.load_state_dict(before | change)
    assert order.state_dict() == before
    assert order.take(2) == permute(5, seed=1, epoch=0)[3:]


def test_a_step_that_is_rolled_back_is_taken_again():
    order = PromptOrder(7, seed=4)
    order.take(5)
    state = order.state_dict()
    first = order.take(4)
    order.load_state_dict(state)
    assert order.take(4) == first
