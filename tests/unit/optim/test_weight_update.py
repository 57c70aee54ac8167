"""W <- W - step U A in tiles: against the naive form, shards, bits of bfloat16 with remainders, and tiny updates."""

import pytest
import torch

from longstraw.optim.masters import join_float32, split_float32
from longstraw.optim.projection import project_columns
from longstraw.optim.sketch import BlockLimits
from longstraw.optim.step_control import ratio_step
from longstraw.optim.update import apply_update, naive_update, projection_gram, sketch_cosine, update_square_norm
from tests.support.sketches import LargestTensor, draw, projection

F64 = torch.float64
TINY = BlockLimits(entries=1)


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
@pytest.mark.parametrize("rows, columns, rank, rows_at_once, limits", [
    (1, 1, 1, 1, TINY), (7, 203, 4, 3, TINY), (7, 203, 4, 100, BlockLimits()), (0, 9, 2, 4, TINY),
])
@pytest.mark.parametrize("with_scale", [True, False])
def test_equals_naive(kind, rows, columns, rank, rows_at_once, limits, with_scale):
    drawn, weight, sketch = projection(rank, columns, kind=kind), draw(rows, columns), draw(rows, rank, seed=1)
    scale = draw(rows, seed=2) if with_scale else None
    expected = naive_update(weight, sketch, project_columns(drawn, 0, columns, dtype=F64), 0.3, scale)
    apply_update(weight, sketch, drawn, 0.3, row_scale=scale, rows_at_once=rows_at_once, limits=limits)
    torch.testing.assert_close(weight, expected, rtol=1e-13, atol=1e-13)


def test_a_shard_gets_its_part():
    drawn, weight, sketch = projection(4, 23), draw(6, 23), draw(6, 4, seed=1)
    whole = naive_update(weight, sketch, project_columns(drawn, 0, 23, dtype=F64), 0.3)
    for columns in (slice(0, 9), slice(9, 9), slice(9, 23)):
        part = weight[:, columns].clone()
        apply_update(part, sketch, drawn, 0.3, column_start=columns.start, limits=TINY)
        torch.testing.assert_close(part, whole[:, columns], rtol=1e-13, atol=1e-13)


def test_shards_at_tile_boundaries_have_the_bits_of_the_whole():
    """Masters sharded by rows over data-parallel ranks, and the rollout side that holds the whole weight."""
    drawn, weight = projection(16, 200), draw(20, 200, dtype=torch.float32)
    sketch = draw(20, 16, seed=1, dtype=torch.float32)
    shards = [weight[a:b].clone() for a, b in ((0, 8), (8, 16), (16, 20))]
    for a, shard in zip((0, 8, 16), shards):
        apply_update(shard, sketch[a : a + len(shard)], drawn, 1e-3, rows_at_once=4)
    apply_update(weight, sketch, drawn, 1e-3, rows_at_once=4)
    assert torch.equal(torch.cat(shards), weight)


def test_a_remainder_gives_the_bits_of_a_float32_master():
    drawn, master = projection(4, 70), draw(9, 70, dtype=torch.float32)
    weight, remainder = split_float32(master)
    for step in range(5):
        sketch, scale = draw(9, 4, seed=step, dtype=torch.float32), draw(9, seed=9 + step, dtype=torch.float32)
        for target, rest in ((master, None), (weight, remainder)):
            apply_update(target, sketch, drawn, 1e-3, row_scale=scale, remainder=rest, rows_at_once=2, limits=TINY)
    assert torch.equal(join_float32(weight, remainder), master)
    assert torch.equal(weight, split_float32(master)[0])


@pytest.mark.parametrize("masters", ["float32", "remainder"])
def test_a_thousand_tiny_updates_arrive(masters):
    """||dW|| = 6e-5 ||W|| each, the reference update ratio, with a common drift; bfloat16 alone loses them."""
    rows, columns, rank, ratio, steps = 16, 192, 8, 6e-5, 1000
    start = draw(rows, columns, dtype=torch.float32).mul_(0.02)
    master, (weight, remainder) = start.clone(), split_float32(start)
    alone, exact = start.to(torch.bfloat16), start.double()
    drift = draw(rows, rank, seed=1, dtype=torch.float32)
    draws = [projection(rank, columns, draw=number) for number in range(2)]
    grams = [projection_gram(drawn) for drawn in draws]
    wholes = [project_columns(drawn, 0, columns, dtype=F64) for drawn in draws]
    for number in range(steps):
        drawn, gram, whole = (each[number * 2 // steps] for each in (draws, grams, wholes))
        sketch = drift + draw(rows, rank, seed=number + 2, dtype=torch.float32)
        eta = ratio_step(start.square().sum(), update_square_norm(sketch, gram), ratio)
        if masters == "float32":
            apply_update(master, sketch, drawn, eta)
        else:
            apply_update(weight, sketch, drawn, eta, remainder=remainder)
        change = eta * sketch.double() @ whole
        exact -= change
        alone -= change.to(torch.bfloat16)
    moved = exact - start.double()
    assert float(moved.norm() / start.norm()) > 0.02
    arrived = master if masters == "float32" else join_float32(weight, remainder)
    assert float((arrived.double() - exact).norm() / moved.norm()) < 1e-4
    lost = float((alone.double() - start.to(torch.bfloat16).double() - moved).norm() / moved.norm())
    assert lost > 0.5


def test_neither_the_projection_nor_the_change_ever_exists():
    rows, columns, rank = 256, 1024, 32
    weight, remainder = split_float32(draw(rows, columns, dtype=torch.float32))
    with LargestTensor() as largest:
        apply_update(
            weight, draw(rows, rank, dtype=torch.float32), projection(rank, columns), 1e-3, remainder=remainder,
            row_scale=torch.ones(rows), rows_at_once=16, limits=BlockLimits(entries=32 * 64),
        )  # fmt: skip
    assert 16 * 64 <= largest.numel <= rows * rank  # the row-scaled slice, a tile, a piece of A


def test_norms_of_the_change_without_the_change():
    drawn, sketch, scale = projection(5, 203), draw(7, 5), draw(7, seed=1)
    whole = project_columns(drawn, 0, 203, dtype=F64)
    gram = projection_gram(drawn, dtype=F64, limits=TINY)
    torch.testing.assert_close(gram, whole @ whole.t(), rtol=1e-13, atol=1e-13)
    cuts = ((0, 50), (50, 50), (50, 203))
    parts = [projection_gram(drawn, dtype=F64, column_start=a, columns=b - a) for a, b in cuts]
    torch.testing.assert_close(sum(parts), gram, rtol=1e-13, atol=1e-13)
    for row_scale in (None, scale):
        change = sketch @ whole if row_scale is None else (row_scale[:, None] * sketch) @ whole
        got = update_square_norm(sketch, gram, row_scale=row_scale, rows_at_once=3)
        torch.testing.assert_close(got, change.square().sum(), rtol=1e-12, atol=0)


def test_the_cosine_needs_norms_only():
    drawn, gradient = projection(5, 203), draw(7, 203)
    whole = project_columns(drawn, 0, 203, dtype=F64)
    sketch = gradient @ whole.t()
    expected = torch.cosine_similarity(gradient.flatten(), (sketch @ whole).flatten(), dim=0)
    back = update_square_norm(sketch, projection_gram(drawn, dtype=F64))
    got = sketch_cosine(float(sketch.square().sum()), float(back), float(gradient.square().sum()))
    assert got == pytest.approx(float(expected), rel=1e-12)
    assert sketch_cosine(0.0, 0.0, 1.0) == 0.0


@pytest.mark.parametrize("change, words", [
    (dict(weight=torch.zeros(4, 9, dtype=torch.bfloat16)), "w is bfloat16 and has no remainder.*--logra-masters"),
    (dict(weight=torch.zeros(4, 9, dtype=torch.float16)), "updates are made in float32"),
    (dict(weight=torch.zeros(9)), r"a weight \[d, k\] is updated|A weight"),
    (dict(sketch=torch.zeros(4, 2)), r"by a sketch \[d, 3\]"),
    (dict(sketch=torch.zeros(5, 3)), r"by a sketch \[d, 3\]"),
    (dict(row_scale=torch.zeros(5)), r"row_scale must be \[4\]"),
    (dict(remainder=torch.zeros(4, 9, dtype=torch.int16)), "beside a bfloat16 weight, got torch.int16"),
    (
        dict(weight=torch.zeros(4, 9, dtype=torch.bfloat16), remainder=torch.zeros(4, 9, dtype=torch.int32)),
        "A remainder is int16",
    ),
    (dict(weight=torch.zeros(4, 10)), "do not lie in A of w"),
    (dict(rows_at_once=0), "rows_at_once must be at least 1"),
])
def test_refuses_what_does_not_fit(change, words):
    given = dict(weight=torch.zeros(4, 9), sketch=torch.zeros(4, 3)) | change
    with pytest.raises(ValueError, match=words):
        apply_update(given.pop("weight"), given.pop("sketch"), projection(3, 9), 0.1, **given)
