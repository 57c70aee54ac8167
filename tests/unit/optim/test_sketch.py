"""Gradient sketches against dense G A^T: odd sizes, shards, experts, precision, autograd, and what exists at once."""

import weakref

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from longstraw.optim.projection import pack_columns, project_columns, unscaled_columns
from longstraw.optim.sketch import (
    BlockLimits,
    WeightSketch,
    add_to_sketch,
    multiply_transposed,
    naive_sketch,
    open_sketch,
    perturbed_linear,
    sketched_linear,
)
from tests.support.sketches import LargestTensor, draw, projection

F64 = torch.float64
TINY = BlockLimits(tokens=3, entries=1)  # 3 tokens and the narrowest block of columns at a time


def relative(got, expected):
    return float((got.double() - expected).norm() / expected.norm().clamp_min(1e-300))


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
@pytest.mark.parametrize("limits", [TINY, BlockLimits(tokens=4, entries=300), BlockLimits()])
@pytest.mark.parametrize("rows, columns, rank", [(1, 1, 1), (5, 203, 4), (64, 130, 64), (7, 64, 1)])
def test_equals_the_dense_gradient_times_the_projection(kind, limits, rows, columns, rank):
    """Bar: 1e-12 in float64. Three backward calls of 1, 0 and 10 tokens."""
    drawn = projection(rank, columns, kind=kind)
    got = open_sketch(torch.empty(rows, columns, dtype=F64), drawn, limits=limits)
    gradient = torch.zeros(rows, columns, dtype=F64)
    for call, tokens in enumerate((1, 0, 10)):
        outputs, inputs = draw(tokens, rows, seed=call), draw(tokens, columns, seed=call + 10)
        got.add(outputs, inputs)
        gradient += outputs.t() @ inputs
    expected = gradient @ project_columns(drawn, 0, columns, dtype=F64).t()
    assert relative(got.sketch, expected) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_sums_are_float32_whatever_the_inputs(dtype, kind):
    """Against float64 on the same rounded inputs, over 20 calls; a 16-bit accumulator would be off by 1e-2."""
    drawn = projection(16, 300, kind=kind)
    got = open_sketch(torch.empty(40, 300, dtype=dtype), drawn, limits=BlockLimits(tokens=8, entries=2048))
    assert got.sketch.dtype == torch.float32
    expected, plain = 0, 0
    for call in range(20):
        outputs, inputs = draw(13, 40, seed=call, dtype=dtype), draw(13, 300, seed=call + 50, dtype=dtype)
        got.add(outputs, inputs)
        expected = expected + naive_sketch(outputs.double(), inputs.double(), drawn)
        plain = plain + naive_sketch(outputs.float(), inputs.float(), drawn)
    assert relative(got.sketch, expected) <= min(1e-6, 2 * relative(plain, expected))


def test_two_bfloat16_halves_lose_little():
    """What CUDA devices do with bfloat16, here on the CPU."""
    narrow, wide = draw(100, 7, dtype=torch.bfloat16), draw(100, 5, seed=1, dtype=torch.float32)
    exact = narrow.double().t() @ wide.double()
    halves = multiply_transposed(narrow, wide, in_halves=True)
    assert halves.dtype == torch.float32 and relative(halves, exact) < 2**-16
    rounded = narrow.float().t() @ wide.to(torch.bfloat16).float()
    assert relative(rounded, exact) > 20 * relative(halves, exact)
    assert relative(multiply_transposed(narrow, wide), exact) < 1e-6


@pytest.mark.parametrize("rows, columns, rank", [(4, 16, 8), (16, 4, 2), (8, 8, 8), (8, 8, 3)])
def test_the_side_is_the_inputs_whatever_the_shape(rows, columns, rank):
    """A public report: a square gradient was projected from the other side than the rest."""
    drawn = projection(rank, columns)
    weight = draw(rows, columns).requires_grad_()
    accumulator = open_sketch(weight, drawn)
    x, grad = draw(6, columns, seed=1), draw(6, rows, seed=2)
    sketched_linear(x, weight, accumulator).backward(grad)
    assert accumulator.sketch.shape == (rows, rank) and weight.grad is None
    expected = (grad.t() @ x) @ project_columns(drawn, 0, columns, dtype=F64).t()
    assert relative(accumulator.sketch, expected) <= 1e-12


def test_a_rank_above_the_inputs_is_refused():
    with pytest.raises(ValueError, match=r"--logra-rank 8 is above the 4 input columns of w, .* no saving"):
        projection(8, 4)


# Shards.


@pytest.mark.parametrize("cuts", [[0, 12, 23], [0, 1, 1, 23], [0, 5, 9, 23]])
def test_row_parallel_shards_add_up(cuts):
    """Each rank has columns of W and the same columns of A; the sum of its parts over TP is the sketch."""
    drawn, weight = projection(4, 23), draw(6, 23)
    x, grad = draw(9, 23, seed=1), draw(9, 6, seed=2)
    parts = []
    for a, b in zip(cuts, cuts[1:]):
        part = open_sketch(weight[:, a:b], drawn, column_start=a, limits=TINY)
        sketched_linear(x[:, a:b], weight[:, a:b], part).backward(grad)
        parts.append(part.sketch)
    assert relative(sum(parts), naive_sketch(grad, x, drawn)) <= 1e-12
    wrong = open_sketch(weight[:, cuts[-2] :], drawn, column_start=0)
    wrong.add(grad, x[:, cuts[-2] :])
    assert relative(wrong.sketch, parts[-1]) > 0.1  # an offset of 0 would be seen


def test_column_parallel_shards_hold_rows():
    drawn, weight = projection(4, 23), draw(6, 23)
    x, grad = draw(9, 23, seed=1), draw(9, 6, seed=2)
    whole = naive_sketch(grad, x, drawn)
    for rows in (slice(0, 1), slice(1, 6), slice(6, 6)):
        part = open_sketch(weight[rows], drawn)
        sketched_linear(x, weight[rows], part).backward(grad[:, rows])
        torch.testing.assert_close(part.sketch, whole[rows], rtol=1e-12, atol=1e-12)


def test_experts_have_a_sketch_each():
    """Four experts, one without tokens; another rank's numbering gives the same sketch, and no two share an A."""
    rows = [slice(0, 5), slice(5, 5), slice(5, 6), slice(6, 11)]
    x, grad = draw(11, 20, seed=1).requires_grad_(), draw(11, 8, seed=2)
    weights = [draw(8, 20, seed=10 + expert) for expert in range(4)]
    names = [f"decoder.layers.1.mlp.experts.{expert}.weight" for expert in range(4)]
    sketches = [open_sketch(w, projection(3, 20, name=name)) for w, name in zip(weights, names)]
    torch.cat([sketched_linear(x[r], w, s) for r, w, s in zip(rows, weights, sketches)]).backward(grad)
    for r, w, s, name in zip(rows, weights, sketches, names):
        expected = naive_sketch(grad[r], x.detach()[r], projection(3, 20, name=name))
        torch.testing.assert_close(s.sketch, expected, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(x.grad[r], grad[r] @ w, rtol=1e-12, atol=1e-13)
    projections = [project_columns(s.projection, 0, 20, dtype=F64) for s in sketches]
    assert all(not torch.equal(a, b) for i, a in enumerate(projections) for b in projections[:i])


# What autograd sees.


@pytest.mark.parametrize("x_asks", [True, False])
@pytest.mark.parametrize("weight_asks", [True, False])
def test_the_input_gets_its_gradient_and_the_weight_none(x_asks, weight_asks):
    x, weight = draw(2, 5, 9, seed=1).requires_grad_(x_asks), draw(4, 9).requires_grad_(weight_asks)
    accumulator = open_sketch(weight, projection(3, 9))
    y = sketched_linear(x, weight, accumulator)
    assert torch.equal(y, F.linear(x, weight)) and y.requires_grad
    grad = draw(2, 5, 4, seed=2)
    for call in (1, 2):  # a graph may be run twice: the sketch adds up, as a gradient would
        y.backward(grad, retain_graph=True)
        expected = call * naive_sketch(grad.flatten(0, 1), x.detach().flatten(0, 1), accumulator.projection)
        assert relative(accumulator.sketch, expected) <= 1e-12
        if x_asks:
            torch.testing.assert_close(x.grad, call * grad @ weight.detach(), rtol=1e-12, atol=1e-12)
    assert weight.grad is None and accumulator.anchor.grad is None and (x.grad is None) != x_asks


def test_recomputation_adds_once():
    x, weight = draw(5, 9, seed=1).requires_grad_(), draw(4, 9)
    accumulator = open_sketch(weight, projection(3, 9))
    y = checkpoint(lambda x: sketched_linear(x.tanh(), weight, accumulator).tanh(), x, use_reentrant=False)
    y.sum().backward()
    dense = weight.clone().requires_grad_()
    F.linear(x.detach().tanh(), dense).tanh().sum().backward()
    expected = dense.grad @ project_columns(accumulator.projection, 0, 9, dtype=F64).t()
    assert relative(accumulator.sketch, expected) <= 1e-12


def test_without_grad_nothing_is_added():
    accumulator = open_sketch(torch.empty(4, 9, dtype=F64), projection(3, 9))
    with torch.no_grad():
        y = sketched_linear(draw(5, 9), draw(4, 9), accumulator)
    assert not y.requires_grad and accumulator.sketch.eq(0).all()


def test_the_accumulator_keeps_nothing_of_the_graph():
    accumulator = open_sketch(torch.empty(4, 9, dtype=F64), projection(3, 9))
    x = draw(5, 9).requires_grad_()
    hidden = x * 2
    sketched_linear(hidden, draw(4, 9), accumulator).sum().backward()
    gone = weakref.ref(hidden)
    del hidden
    assert gone() is None


# What exists at once.


def test_neither_the_gradient_nor_the_projection_ever_exists():
    rows, columns, rank, tokens = 512, 1024, 32, 24
    limits = BlockLimits(tokens=8, entries=32 * 64)
    accumulator = open_sketch(torch.empty(rows, columns), projection(rank, columns), limits=limits)
    outputs, inputs = draw(tokens, rows, dtype=torch.float32), draw(tokens, columns, seed=1, dtype=torch.float32)
    with LargestTensor() as largest:
        accumulator.add(outputs, inputs)
    assert largest.numel <= rows * rank  # one product of the size of S; A has twice and G 32 times as many
    with LargestTensor() as largest:
        naive_sketch(outputs, inputs, accumulator.projection)
    assert largest.numel == rows * columns  # the probe sees G


@pytest.mark.parametrize("start, stop", [(0, 203), (70, 71), (64, 203), (3, 130), (5, 5)])
def test_packed_words_give_the_same_entries(start, stop):
    for kind in ("rademacher", "gaussian"):
        drawn = projection(5, 203, kind=kind)
        packed = pack_columns(drawn, start, stop)
        assert packed.words.dtype == torch.int32
        for a, b in ((start, stop), (start, (start + stop) // 2), (stop, stop), ((start + stop) // 2, stop)):
            for dtype in (torch.float32, F64):
                assert torch.equal(packed.entries(a, b, dtype), unscaled_columns(drawn, a, b, dtype=dtype))
        with pytest.raises(ValueError, match=r"were not packed, only \["):
            packed.entries(start, stop + 1, F64)
        if kind == "gaussian":
            with pytest.raises(ValueError, match="gaussian has entries"):
                packed.entries(start, stop, torch.bfloat16)


def test_words_are_kept_for_a_draw_and_no_longer():
    outputs, inputs = draw(5, 6), draw(5, 300, seed=1)
    accumulator = open_sketch(torch.empty(6, 300, dtype=F64), projection(16, 300))
    accumulator.add(outputs, inputs)
    first = accumulator.packed
    assert first.words.nbytes == 16 * 320 // 8  # one bit an entry, to a multiple of 64 columns
    accumulator.add(outputs, inputs)
    accumulator.restart(2)
    assert accumulator.packed is first and accumulator.sketch.eq(0).all()
    accumulator.restart(3)
    assert accumulator.packed is None
    accumulator.add(outputs, inputs)
    assert relative(accumulator.sketch, naive_sketch(outputs, inputs, projection(16, 300, draw=3))) <= 1e-12


def test_the_accumulator_of_a_4096_square_is_one_mebibyte():
    weight = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    assert open_sketch(weight, projection(64, 4096)).sketch.nbytes == 2**20
    assert 4 * weight.numel() == 64 * 2**20  # of a float32 main_grad


# Probes.


@pytest.mark.parametrize("with_scale", [True, False])
@pytest.mark.parametrize("limits", [TINY, BlockLimits()])
def test_perturbed_linear_equals_the_moved_weight(with_scale, limits):
    drawn, weight, direction, x = projection(4, 70), draw(6, 70), draw(6, 4, seed=1), draw(2, 3, 70, seed=2)
    scale = draw(6, seed=3) if with_scale else None
    moved = direction * scale[:, None] if with_scale else direction
    expected = F.linear(x, weight + 0.3 * moved @ project_columns(drawn, 0, 70, dtype=F64))
    got = perturbed_linear(x, weight, direction, drawn, 0.3, row_scale=scale, limits=limits)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    given = dict(row_scale=scale, limits=limits)
    shards = [
        perturbed_linear(x[..., a:b], weight[:, a:b], direction, drawn, 0.3, column_start=a, **given)
        for a, b in ((0, 33), (33, 70))
    ]
    torch.testing.assert_close(sum(shards), expected, rtol=1e-12, atol=1e-12)


def test_a_dual_step_gives_the_derivative_along_the_direction():
    """Two layers, so that the second one's tangent comes from its own direction and from its input's tangent."""
    sizes = [(7, 20), (5, 7)]
    weights = [draw(*size, seed=i) for i, size in enumerate(sizes)]
    drawn = [projection(3, columns, name=str(columns)) for _, columns in sizes]
    directions = [draw(rows, 3, seed=10 + i) for i, (rows, _) in enumerate(sizes)]
    x = draw(4, 20, seed=20)
    with torch.no_grad(), forward_ad.dual_level():
        step = forward_ad.make_dual(torch.zeros((), dtype=F64), torch.ones((), dtype=F64))
        y = x
        for weight, direction, a in zip(weights, directions, drawn):
            y = perturbed_linear(y, weight, direction, a, step).tanh()
        value, tangent = forward_ad.unpack_dual(y)
    dense = [d @ project_columns(a, 0, a.columns, dtype=F64) for d, a in zip(directions, drawn)]
    expected = torch.func.jvp(lambda a, b: F.linear(F.linear(x, a).tanh(), b).tanh(), tuple(weights), tuple(dense))
    torch.testing.assert_close((value, tangent), expected, rtol=1e-12, atol=1e-13)


# Refusals.


def test_refuses_what_does_not_fit():
    drawn = projection(3, 9)
    with pytest.raises(ValueError, match="Only matrices are sketched; w is"):
        open_sketch(torch.empty(9), drawn)
    for columns, start in ((9, 1), (10, 0), (3, -1)):
        with pytest.raises(ValueError, match="do not lie in its 9 columns"):
            open_sketch(torch.empty(4, columns), drawn, column_start=start)
    with pytest.raises(ValueError, match=r"must be \[d, 3\]"):
        WeightSketch(projection=drawn, sketch=torch.zeros(4, 2), columns=9)
    accumulator = open_sketch(torch.empty(4, 9), drawn)
    for x, weight in ((torch.empty(5, 8), torch.empty(4, 9)), (torch.empty(5, 9), torch.empty(9, 4))):
        with pytest.raises(ValueError, match="do not fit"):
            sketched_linear(x, weight, accumulator)
    for outputs, inputs in ((torch.empty(5, 3), torch.empty(5, 9)), (torch.empty(4, 4), torch.empty(5, 9))):
        with pytest.raises(ValueError, match="takes gradients"):
            add_to_sketch(accumulator.sketch, outputs, inputs, drawn)
