"""Trees of segments, their columns over blocks and ranks, and what is refused before anything runs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw.attention.layout import plan_blocks
from longstraw.segments import Segment, SegmentState, cut_columns, grow_group, own_columns
from longstraw.sweep_config import SweepConfig


def tokens(*values):
    return torch.tensor([values])


def test_a_group_holds_back_the_prompts_last_token():
    """The first response token is predicted from the prompt's last one, which each response starts with."""
    prompt, responses = tokens(1, 2, 3), [torch.tensor([[4, 5], [6, 7]]), tokens(8)]
    root = grow_group(prompt, responses, [len, max])
    assert root.inputs.tolist() == [[1, 2]] and root.targets is None and root.loss is None
    first, second = root.children
    assert first.inputs.tolist() == [[3, 4], [3, 6]] and first.targets.tolist() == [[4, 5], [6, 7]] and first.loss is len
    assert second.inputs.tolist() == [[3]] and second.targets.tolist() == [[8]] and second.loss is max


def test_a_prompt_of_one_token_leaves_an_empty_root():
    assert grow_group(tokens(1), [tokens(2)], [len]).length == 0


@pytest.mark.parametrize("prompt, response", [(torch.zeros(1, 0), tokens(1)), (tokens(1), torch.zeros(1, 0))])
def test_empty_prompts_and_responses_are_refused(prompt, response):
    with pytest.raises(ValueError, match="a prompt and a response have at least 1 token"):
        grow_group(prompt, [response], [len])


def test_bad_shapes_are_refused():
    with pytest.raises(ValueError, match=r"segment a: inputs are \[batch, tokens\], not \(3,\)"):
        Segment("a", torch.zeros(3))
    with pytest.raises(ValueError, match=r"segment a: \(1, 2\) targets for \(1, 3\) inputs"):
        Segment("a", torch.zeros(1, 3), torch.zeros(1, 2))
    with pytest.raises(ValueError):
        grow_group(tokens(1), [tokens(2), tokens(3)], [len])


@pytest.mark.parametrize("field", ["prompt_chunk_size", "response_block_size", "query_rows_at_once", "logprob_chunk_tokens"])
def test_sizes_below_one_are_refused(field):
    with pytest.raises(ValueError, match=f"--{field.replace('_', '-')} is at least 1, not 0"):
        SweepConfig(**{field: 0})


@pytest.mark.parametrize("field, place", [
    ("page_residency", "none"), ("index_page_residency", "none"), ("adjoint_residency", None),
    ("attention_output_residency", "disk"), ("selection_residency", ""),
])
def test_state_without_a_residency_is_refused(field, place):
    with pytest.raises(ValueError, match=f"--{field.replace('_', '-')} is one of .*, not {place}"):
        SweepConfig(**{field: place})


@settings(max_examples=80, deadline=None)
@given(
    start=st.integers(0, 30), length=st.integers(1, 50), block_size=st.integers(1, 60), ranks=st.integers(1, 4),
    unit=st.integers(1, 3),
)
def test_columns_of_blocks_and_ranks_cover_the_segment(start, length, block_size, ranks, unit):
    """Every column in one block, and in one rank's part of that block; rows_before counts what a rank owned before."""
    columns, owned = [], []
    for rank in range(ranks):
        plan = plan_blocks(start, length, block_size, ranks, rank, unit, None)
        state, before = SegmentState("s", None, plan, 1, start), 0
        assert state.end == start + length
        for block in range(len(plan)):
            whole, own = cut_columns(state, block), own_columns(state, block)
            assert whole.start <= own.start <= own.stop <= whole.stop
            assert state.rows_before(block) == before
            before += own.stop - own.start
            owned += range(own.start, own.stop)
            columns += range(whole.start, whole.stop) if rank == 0 else []
    assert columns == list(range(length)) and sorted(owned) == list(range(length))


def test_an_empty_segment_ends_where_it_starts():
    parent = SegmentState("p", None, plan_blocks(0, 5, 2, 1, 0, 1, None), 1, 0)
    state = SegmentState("s", parent, [], 1, parent.end)
    assert state.end == 5 and state.ancestors() == [parent]
