"""RowAdam against its naive form, over steps, slices, scales and rows without gradient."""

import pytest
import torch

from longstraw.optim.projection import Projection
from longstraw.optim.row_adam import naive_row_adam, row_scales, row_squares, update_row_moment
from longstraw.optim.sketch import naive_sketch

F64 = torch.float64


def sketches(rows, rank, steps, dtype=F64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(rows, 1, generator=generator, dtype=F64) * 6 - 3
    return (torch.randn(steps, rows, rank, generator=generator, dtype=F64) * 10.0**spread).to(dtype)


def take_steps(all_sketches, *, beta2=0.95, rows_at_once=3):
    moment = torch.zeros(all_sketches.shape[1], dtype=all_sketches.dtype)
    for step, sketch in enumerate(all_sketches, start=1):
        squares = row_squares(sketch, rows_at_once=rows_at_once)
        moment = update_row_moment(moment, squares, sketch.shape[1], beta2=beta2)
        yield row_scales(moment, squares, step, beta2=beta2)[:, None] * sketch, moment


@pytest.mark.parametrize("rows, rank", [(1, 1), (1, 5), (7, 1), (10, 4)])
@pytest.mark.parametrize("beta2", [0.0, 0.95])
def test_equals_naive_over_steps(rows, rank, beta2):
    all_sketches = sketches(rows, rank, 6)
    moment = torch.zeros(rows, dtype=F64)
    for step, (direction, got) in enumerate(take_steps(all_sketches, beta2=beta2), start=1):
        expected, moment = naive_row_adam(all_sketches[step - 1], moment, step, beta2)
        torch.testing.assert_close((direction, got), (expected, moment), rtol=1e-12, atol=0)


def test_float32_stays_near_float64():
    all_sketches = sketches(40, 16, 5)
    for (got, got_moment), (exact, moment) in zip(take_steps(all_sketches.float()), take_steps(all_sketches)):
        assert got.dtype == got_moment.dtype == torch.float32
        torch.testing.assert_close((got.double(), got_moment.double()), (exact, moment), rtol=2e-6, atol=0)


def test_the_norm_is_the_sketch_s():
    all_sketches = sketches(23, 6, 4)
    for sketch, (direction, _) in zip(all_sketches, take_steps(all_sketches)):
        torch.testing.assert_close(direction.norm(), sketch.norm(), rtol=1e-12, atol=0)


def test_the_first_step_gives_every_row_the_same_length():
    (direction, _), = take_steps(sketches(9, 5, 1))
    torch.testing.assert_close(direction.norm(dim=1), direction.norm().expand(9) / 3, rtol=1e-12, atol=0)


def test_slices_do_not_change_a_bit():
    all_sketches = sketches(11, 5, 3, torch.float32)
    whole = list(take_steps(all_sketches, rows_at_once=100))
    for rows_at_once in (1, 4, 11):
        for (a, b), (c, d) in zip(take_steps(all_sketches, rows_at_once=rows_at_once), whole):
            assert torch.equal(a, c) and torch.equal(b, d)


def test_rows_without_gradient_get_nothing_and_disturb_nobody():
    all_sketches = sketches(8, 5, 3)
    all_sketches[:, 2] = 0  # never
    all_sketches[0, 5] = 0  # not at first
    results = list(take_steps(all_sketches))
    kept = [row for row in range(8) if row != 2]
    for (direction, moment), (without, _) in zip(results, take_steps(all_sketches[:, kept])):
        assert direction.isfinite().all() and direction[2].eq(0).all() and moment[2] == 0
        torch.testing.assert_close(direction[kept], without, rtol=1e-12, atol=0)
    # A row that wakes up is bounded by the square that it adds itself: not above its bias-corrected share.
    row = results[1][0][5].norm() / results[1][0].norm()
    assert 0 < row < 1


def test_all_zero():
    (direction, moment), = take_steps(torch.zeros(1, 4, 3))
    assert direction.eq(0).all() and moment.eq(0).all()


@pytest.mark.parametrize("exponent", [-50, -20, 0, 20])
def test_the_direction_scales_with_the_sketch(exponent):
    """No constant in the root: gradients of a large model may be as small as they like."""
    all_sketches = sketches(10, 4, 3, torch.float32).clamp(-1, 1)
    factor = 2.0**exponent
    for (small, _), (plain, _) in zip(take_steps(all_sketches * factor), take_steps(all_sketches)):
        torch.testing.assert_close(small, plain * factor, rtol=1e-5, atol=0)


def test_the_old_moment_is_left_alone():
    old = torch.ones(4)
    new = update_row_moment(old, torch.full((4,), 8.0), 2)
    assert old.eq(1).all() and torch.allclose(new, torch.tensor(0.95 + 0.05 * 4.0))


def test_row_statistics_survive_a_new_draw():
    """Under every A a row's mean square estimates ||G_i||^2 / R."""
    generator = torch.Generator().manual_seed(3)
    rank, scales = 16, 10.0 ** torch.linspace(-2, 2, 6, dtype=F64)
    outputs = torch.randn(50, 6, generator=generator, dtype=F64) * scales
    inputs = torch.randn(50, 96, generator=generator, dtype=F64)
    moment, steps = torch.zeros(6, dtype=F64), 120
    for step in range(1, steps + 1):
        projection = Projection(name="w", rank=rank, columns=96, seed=0, draw=step)
        squares = row_squares(naive_sketch(outputs, inputs, projection))
        moment = update_row_moment(moment, squares, rank)
    estimate = moment / (1 - 0.95**steps) * rank
    torch.testing.assert_close(estimate, (outputs.t() @ inputs).square().sum(1), rtol=0.25, atol=0)


def test_refusals():
    with pytest.raises(ValueError, match="counts its steps from 1"):
        row_scales(torch.ones(3), torch.ones(3), 0)
    with pytest.raises(ValueError, match="another weight: its sketch has 4 rows"):
        update_row_moment(torch.ones(3), torch.ones(4), 2)
