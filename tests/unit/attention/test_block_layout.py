"""How blocks lie over the ranks: every token owned once, even rows, right positions, and fair rotation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw.attention.layout import BlockLayout, pad_rows, plan_blocks

PLANS = dict(
    start=st.integers(0, 50), length=st.integers(1, 90), block_size=st.integers(1, 40), ranks=st.integers(1, 5),
    unit=st.integers(1, 4),
)


def plans_of_ranks(start, length, block_size, ranks, unit):
    """plan[rank][block]."""
    return [plan_blocks(start, length, block_size, ranks, rank, unit, None) for rank in range(ranks)]


def slots(layouts):
    """One block's layouts of all ranks, in the order of positions."""
    return sorted(layouts, key=lambda layout: layout.slot)


@settings(max_examples=150, deadline=None)
@given(**PLANS)
def test_every_token_is_owned_once_and_in_order(start, length, block_size, ranks, unit):
    owned = []
    for block in zip(*plans_of_ranks(start, length, block_size, ranks, unit), strict=True):
        assert sum(layout.mine for layout in block) == block[0].length <= block_size
        for layout in slots(block):
            positions = list(range(layout.row_position, layout.row_position + layout.mine))
            owned += positions
            assert all(layout.owner(p - layout.start) == layout.rank for p in positions)
            assert layout.first == (positions[0] - layout.start if positions else layout.length)
    assert owned == list(range(start, start + length))


@settings(max_examples=150, deadline=None)
@given(**PLANS)
def test_rows_are_even_and_no_longer_than_needed(start, length, block_size, ranks, unit):
    for block in zip(*plans_of_ranks(start, length, block_size, ranks, unit), strict=True):
        assert len({(layout.rows, layout.start, layout.length, layout.rotation) for layout in block}) == 1
        layout = block[0]
        assert layout.rows % unit == 0 and 1 <= layout.rows
        assert layout.ranks * layout.rows >= layout.length > layout.ranks * (layout.rows - unit)
        assert {layout.slot for layout in block} == set(range(ranks))
        assert all(0 <= layout.mine <= layout.rows for layout in block)


@settings(max_examples=100, deadline=None)
@given(**PLANS, batch=st.integers(1, 3))
def test_rows_taken_by_the_ranks_are_the_block(start, length, block_size, ranks, unit, batch):
    tokens = torch.arange(1, batch * length + 1).view(batch, length)
    for block in zip(*plans_of_ranks(start, length, block_size, ranks, unit), strict=True):
        first = block[0].start - start
        own = tokens[:, first : first + block[0].length]
        taken = torch.cat([layout.take_rows(own) for layout in slots(block)], 1)
        assert torch.equal(taken[:, : own.shape[1]], own)
        assert not taken[:, own.shape[1] :].any()
        assert all(layout.take_rows(own).shape == (batch, layout.rows) for layout in block)


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 60), at_once=st.integers(1, 70))
def test_sub_blocks_cover_the_rows(rows, at_once):
    spans = BlockLayout(0, rows).sub_blocks(at_once)
    assert [a for a, _ in spans] == list(range(0, rows, at_once))
    assert [b for _, b in spans] == [*(a for a, _ in spans[1:]), rows]


@settings(max_examples=150, deadline=None)
@given(**PLANS)
def test_blocks_rotate_over_the_ranks(start, length, block_size, ranks, unit):
    """Blocks that the ranks cannot share evenly: no rank owns more than one block's tokens more than another."""
    plan = plans_of_ranks(start, length, block_size, ranks, unit)
    owned = [sum(layout.mine for layout in blocks) for blocks in plan]
    assert max(owned) - min(owned) <= block_size, owned


def test_labels_are_shifted_before_the_split():
    """Tokens 10..17 over 2 ranks: rank 0 predicts 11, 12, 13, 14, rank 1 predicts 15, 16, 17 and nothing."""
    sequence = torch.arange(10, 18)[None]
    inputs, targets = sequence[:, :-1], sequence[:, 1:]
    ranks = [BlockLayout(0, inputs.shape[1], ranks=2, rank=rank) for rank in range(2)]
    assert ranks[0].take_rows(inputs).tolist() == [[10, 11, 12, 13]]
    assert ranks[0].take_rows(targets)[:, : ranks[0].mine].tolist() == [[11, 12, 13, 14]]
    assert ranks[1].take_rows(inputs)[:, : ranks[1].mine].tolist() == [[14, 15, 16]]
    assert ranks[1].take_rows(targets)[:, : ranks[1].mine].tolist() == [[15, 16, 17]]
    assert ranks[1].rows == ranks[0].rows == 4


def test_positions_of_a_later_chunk():
    """A chunk at offset 12 of 16 over 2 ranks: rank 1's rows are 14 and 15."""
    layout = BlockLayout(start=12, length=4, ranks=2, rank=1)
    assert (layout.row_position, layout.rows, layout.mine) == (14, 2, 2)


def test_ranks_that_own_nothing_still_have_rows():
    layouts = [BlockLayout(5, 1, ranks=4, rank=rank, rotation=3, unit=2) for rank in range(4)]
    assert [layout.mine for layout in layouts] == [0, 0, 0, 1]
    assert [layout.rows for layout in layouts] == [2, 2, 2, 2]
    assert all(layout.first == 1 for layout in layouts[:3])


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="at least 1 token, not 0"):
        BlockLayout(0, 0)
    with pytest.raises(ValueError, match="--prompt-chunk-size and --response-block-size are at least 1, not 0"):
        plan_blocks(0, 5, 0, 1, 0, 1, None)
    assert plan_blocks(3, 0, 4, 2, 0, 1, None) == []


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_pad_rows_adds_zeros_at_the_end(dim):
    x = torch.ones(2, 2, 2, requires_grad=True)
    padded = pad_rows(x, 5, dim)
    assert padded.shape[dim] == 5 and torch.equal(padded.narrow(dim, 0, 2), x)
    assert not padded.narrow(dim, 2, 3).any()
    assert pad_rows(x, 2, dim) is x
