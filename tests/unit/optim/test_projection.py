"""A made from counters: known answers, fixed values, any piece equals the whole, what the gaussian's table is."""

import hashlib
import math
from statistics import NormalDist

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw.optim.projection import (
    GAUSSIAN_GRID,
    MASK,
    Projection,
    _gaussian_levels,
    draw_words,
    mix_counter,
    naive_entry,
    project_columns,
    unscaled_columns,
)

KINDS = ("rademacher", "gaussian")


def projection(**changes):
    given = dict(name="decoder.layers.0.mlp.linear_fc1.weight", rank=5, columns=203, seed=7, draw=3)
    return Projection(**(given | changes))


@pytest.mark.parametrize("rounds, counter, key, expected", [
    (20, (0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    (20, (MASK, MASK), (MASK, MASK), (0x1CB996FC, 0xBB002BE7)),
    (20, (0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    (13, (0, 0), (0, 0), (0x9D1C5EC6, 0x8BD50731)),
    (13, (MASK, MASK), (MASK, MASK), (0xFD36D048, 0x2D17272C)),
])
def test_threefry_gives_its_published_answers(rounds, counter, key, expected):
    assert mix_counter(key, *counter, rounds) == expected
    tensors = [torch.full((3,), word, dtype=torch.int64) for word in counter]
    assert [word.tolist() for word in mix_counter(key, *tensors, rounds)] == [[word] * 3 for word in expected]


def test_fixed_values():
    """A change of any of these makes old checkpoints and weight files unreadable."""
    assert projection().key == FIXED["key"]
    assert draw_words(projection(), (4, 5), (3, 4)).flatten().tolist() == FIXED["words"]
    for kind in KINDS:
        whole = unscaled_columns(projection(kind=kind), 0, 203, dtype=torch.float32).contiguous()
        assert [naive_entry(projection(kind=kind), 2, column) for column in range(60, 66)] == FIXED[kind][:6]
        assert hashlib.sha256(whole.numpy().tobytes()).hexdigest()[:16] == FIXED[kind][6]


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(KINDS), st.integers(1, 7), st.integers(1, 150))
def test_every_piece_equals_the_naive_entries(data, kind, rank, columns):
    drawn = projection(kind=kind, rank=min(rank, columns), columns=columns)
    start = data.draw(st.integers(0, columns))
    stop = data.draw(st.integers(start, columns))
    first = data.draw(st.integers(0, drawn.rank))
    last = data.draw(st.integers(first, drawn.rank))
    got = unscaled_columns(drawn, start, stop, dtype=torch.float64, rows=(first, last))
    expected = [[naive_entry(drawn, row, column) for column in range(start, stop)] for row in range(first, last)]
    assert got.tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_lie_side_by_side_in_the_whole(kind):
    drawn = projection(kind=kind)
    whole = project_columns(drawn, 0, 203, dtype=torch.float32)
    cuts = [0, 1, 64, 65, 65, 127, 192, 203]
    pieces = [project_columns(drawn, a, b, dtype=torch.float32) for a, b in zip(cuts, cuts[1:])]
    assert torch.equal(torch.cat(pieces, 1), whole)


@pytest.mark.parametrize("rank", [1, 3, 48, 256])
def test_entries_are_one_rounded_product_away(rank):
    drawn = projection(rank=rank, columns=300)
    for dtype in (torch.float32, torch.float64):
        signs = unscaled_columns(drawn, 0, 300, dtype=dtype)
        assert signs.unique().tolist() == [-1.0, 1.0]
        expected = torch.tensor(1 / math.sqrt(rank), dtype=dtype)
        assert torch.equal(project_columns(drawn, 0, 300, dtype=dtype), signs * expected)
        assert torch.equal(unscaled_columns(drawn, 0, 300, dtype=torch.bfloat16).to(dtype), signs)


def test_gaussian_entries_are_exact_in_float32():
    drawn = projection(kind="gaussian")
    single, double = (unscaled_columns(drawn, 0, 203, dtype=dtype) for dtype in (torch.float32, torch.float64))
    assert torch.equal(single.double(), double)


def test_each_part_of_the_name_changes_the_matrix():
    base = projection(rank=16, columns=512)
    whole = unscaled_columns(base, 0, 512, dtype=torch.float32)
    assert torch.equal(unscaled_columns(projection(rank=16, columns=512), 0, 512, dtype=torch.float32), whole)
    for change in (dict(seed=8), dict(seed=-7), dict(draw=4), dict(name="decoder.layers.0.mlp.linear_fc1.weigh")):
        other = unscaled_columns(projection(rank=16, columns=512, **change), 0, 512, dtype=torch.float32)
        assert 0.4 < (other == whole).float().mean() < 0.6, change
    # Rank and width are no part of it: a smaller A is a corner of a larger one.
    assert torch.equal(unscaled_columns(projection(rank=3, columns=100), 0, 100, dtype=torch.float32), whole[:3, :100])


def test_gaussian_levels_do_not_depend_on_a_library_s_last_bit():
    levels = torch.tensor(_gaussian_levels(), dtype=torch.float64)
    assert torch.equal(levels, -levels.flip(0)) and bool((levels.diff() >= 0).all())
    values = levels * GAUSSIAN_GRID
    assert abs(float(values.square().mean()) - 1) < 1e-8
    assert 2.99 < float(values.pow(4).mean()) < 3
    assert 4.32 < float(values.max()) < 4.34
    # Distance of the unrounded quantiles from the rounding boundaries of the grid, against a library's error of 1e-15.
    exact = torch.tensor([NormalDist().inv_cdf((u + 0.5) / 65536) for u in range(32768, 65536)], dtype=torch.float64)
    scaled = exact / exact.square().mean().sqrt() / GAUSSIAN_GRID
    assert float((scaled - scaled.floor() - 0.5).abs().min()) * GAUSSIAN_GRID > 1e-12
    digest = hashlib.sha256(levels.to(torch.int32).numpy().tobytes()).hexdigest()[:16]
    assert digest == FIXED["levels"]


@pytest.mark.parametrize("change, words", [
    (dict(rank=204), r"--logra-rank 204 is above the 203 input columns .* no saving"),
    (dict(rank=0), "--logra-rank must be at least 1"),
    (dict(seed=2**63), "--logra-seed must fit 64 bits"),
    (dict(draw=-1), "counts from 0"),
    (dict(kind="uniform"), "--logra-projection must be rademacher or gaussian"),
])
def test_refuses_what_cannot_be_drawn(change, words):
    with pytest.raises(ValueError, match=words):
        projection(**change)


def test_a_rank_as_large_as_the_columns_is_allowed():
    assert project_columns(projection(rank=203), 0, 203, dtype=torch.float32).shape == (203, 203)


@pytest.mark.parametrize("start, stop, rows", [
    (-1, 3, None), (5, 4, None), (0, 204, None), (0, 3, (0, 6)), (0, 3, (2, 1)),
])
def test_refuses_pieces_outside_the_matrix(start, stop, rows):
    with pytest.raises(ValueError, match="do not lie in A of decoder"):
        unscaled_columns(projection(), start, stop, dtype=torch.float32, rows=rows)


def test_refuses_gaussian_entries_in_16_bits():
    with pytest.raises(ValueError, match="gaussian has entries that torch.bfloat16 would round"):
        unscaled_columns(projection(kind="gaussian"), 0, 3, dtype=torch.bfloat16)


FIXED = {
    "key": (44787775, 2615440319),
    "words": [3875281315, 1968224922],
    "rademacher": [1.0, 1.0, -1.0, 1.0, 1.0, 1.0, "a1875da3b1bfbe5c"],
    "gaussian": [
        0.29944610595703125, 0.4959259033203125, -0.9334907531738281, -0.09939956665039062, 1.3083763122558594,
        -0.57257080078125, "c67a46cbcd2fbe17"],
    "levels": "7a9bd08d44ab3319",
}
