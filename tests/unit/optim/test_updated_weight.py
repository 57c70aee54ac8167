"""One weight's directions against their definitions, refused steps, and masters shared out by rows."""

import pytest
import torch

from longstraw.optim.config import LograConfig
from longstraw.optim.master_rows import MasterRows
from longstraw.optim.optimizer import Logra, RankGroups, open_sketch_buffers
from longstraw.optim.projection import project_columns
from longstraw.optim.row_adam import naive_row_adam
from longstraw.optim.sketch import WeightSketch
from longstraw.optim.updated_weight import AdamRates, Placement, UpdatedWeight
from tests.support.sketches import draw, projection

ROWS, COLUMNS, RANK = 6, 70, 4
CLOSE = dict(rtol=1e-12, atol=1e-12)


def open_weight(rule: str, sketched: bool = True, dtype=torch.float64, **options) -> UpdatedWeight:
    weight = torch.nn.Parameter(draw(ROWS, COLUMNS).to(dtype))
    opened = UpdatedWeight(name="w", weight=weight, placement=Placement(columns=COLUMNS), rule=rule, **options)
    if sketched:
        wide = torch.promote_types(dtype, torch.float32)
        sketch = torch.zeros(ROWS, RANK, dtype=wide)
        opened.sketch = WeightSketch(projection=projection(RANK, COLUMNS), sketch=sketch, columns=COLUMNS)
    return opened


def take_two_steps(weight: UpdatedWeight, step_size: float = 0.1):
    """Two steps with made-up gradients; returns them."""
    gradients = [draw(ROWS, COLUMNS, seed=seed) for seed in (1, 2)]
    for t, gradient in enumerate(gradients, 1):
        if weight.sketch is not None:
            weight.sketch.restart(weight.projection.draw)
            weight.sketch.add_gradient(gradient)
        weight.prepare(t, None if weight.sketch is not None else gradient.clone())
        weight.apply(step_size)
    return gradients


def test_sketched_sgd_and_row_adam():
    for rule in ("sgd", "rowadam"):
        weight = open_weight(rule)
        a = project_columns(weight.projection, 0, COLUMNS, dtype=torch.float64)
        expected, moment = weight.weight.detach().clone(), torch.zeros(ROWS, dtype=torch.float64)
        for t, gradient in enumerate(take_two_steps(weight), 1):
            direction = gradient @ a.t()
            if rule == "rowadam":
                direction, moment = naive_row_adam(direction, moment, t)
            expected -= 0.1 * direction @ a
        torch.testing.assert_close(weight.weight.data, expected, **CLOSE)


def test_dense_sgd_and_row_adam():
    for rule in ("sgd", "rowadam"):
        weight = open_weight(rule, sketched=False)
        expected, moment = weight.weight.detach().clone(), torch.zeros(ROWS, dtype=torch.float64)
        for t, gradient in enumerate(take_two_steps(weight), 1):
            if rule == "rowadam":
                gradient, moment = naive_row_adam(gradient, moment, t)
            expected -= 0.1 * gradient
        torch.testing.assert_close(weight.weight.data, expected, **CLOSE)


def test_dense_adam_is_torchs():
    weight = open_weight("adam", sketched=False, adam=AdamRates(beta1=0.8, beta2=0.95, eps=1e-6))
    plain = torch.nn.Parameter(weight.weight.detach().clone())
    optimizer = torch.optim.Adam([plain], lr=0.1, betas=(0.8, 0.95), eps=1e-6)
    for gradient in take_two_steps(weight):
        plain.grad = gradient.clone()
        optimizer.step()
    torch.testing.assert_close(weight.weight.data, plain.data, **CLOSE)


@pytest.mark.parametrize("rule, sketched", [("sgd", True), ("rowadam", True), ("rowadam", False), ("adam", False)])
def test_products_and_moved_weights_are_those_of_the_step(rule, sketched):
    """What a probe computes at a step is what the weight gives after it; giving the step up leaves weight and moments."""
    weight, x = open_weight(rule, sketched), draw(3, COLUMNS, seed=9)
    take_two_steps(weight)
    before, moments = weight.weight.detach().clone(), weight.moment if weight.moments is None else weight.moments[0]
    if sketched:
        weight.sketch.add_gradient(draw(ROWS, COLUMNS, seed=3))
    weight.prepare(3, None if sketched else draw(ROWS, COLUMNS, seed=3))
    product, moved = weight.product(x, weight.weight.data, 0.3), weight.moved_weight(0.3)
    assert torch.equal(weight.weight.data, before)
    norm = weight.direction_square_norm()
    torch.testing.assert_close(norm, (moved - before).square().sum() / 0.09, rtol=1e-9, atol=1e-12)
    weight.apply(0.3)
    torch.testing.assert_close(weight.weight.data, moved, **CLOSE)
    torch.testing.assert_close(product, x @ moved.t(), **CLOSE)
    after = weight.moment if weight.moments is None else weight.moments[0]
    assert moments is None or not torch.equal(after, moments)


def test_a_step_that_is_given_up_leaves_the_moments():
    weight = open_weight("rowadam")
    take_two_steps(weight)
    before = weight.moment.clone()
    weight.prepare(3)
    weight.forget()
    assert torch.equal(weight.moment, before)


@pytest.mark.parametrize("residency", ["device", "host"])
def test_remainders_and_float32_masters_make_the_same_updates(residency):
    ends = []
    for kind in ("float32", "remainder"):
        weight = open_weight("rowadam", dtype=torch.bfloat16)
        weight.masters = MasterRows(weight.weight.data, kind=kind, residency=residency, rows_at_once=4)
        for _ in range(20):
            take_two_steps(weight, 1e-4)
        ends.append((weight.weight.data.clone(), weight.masters.whole(weight.weight.data)))
    (first, full), (second, other) = ends
    assert torch.equal(first, second) and torch.equal(full, other) and not torch.equal(full.bfloat16().float(), full)


def test_masters_go_through_a_checkpoint():
    weight = open_weight("sgd", dtype=torch.bfloat16)
    weight.masters = MasterRows(weight.weight.data, kind="remainder", residency="device")
    take_two_steps(weight, 1e-3)
    full, low = weight.masters.whole(weight.weight.data), weight.weight.data.clone()
    weight.weight.data.zero_()
    weight.masters.reset(weight.weight.data)
    weight.masters.load(weight.weight.data, full)
    assert torch.equal(weight.weight.data, low) and torch.equal(weight.masters.whole(weight.weight.data), full)
    with pytest.raises(ValueError, match="Masters belong to bfloat16 weights"):
        MasterRows(torch.zeros(2, 2), kind="remainder", residency="device")


def test_one_eta_for_all_matrices():
    """||eta D|| = ratio ||W|| over both; bytes are those of the sketches, not of gradients."""
    config = LograConfig(logra_rank=RANK, update_step_size="update-ratio", logra_update_ratio=1e-3)
    weights = [open_weight("rowadam"), open_weight("rowadam")]
    buffers, views = open_sketch_buffers([("rows", ROWS, RANK), ("rows", ROWS, RANK)], torch.float64, torch.device("cpu"))
    for seed, (weight, view) in enumerate(zip(weights, views)):
        weight.sketch = WeightSketch(projection=projection(RANK, COLUMNS), sketch=view, columns=COLUMNS)
        weight.sketch.add_gradient(draw(ROWS, COLUMNS, seed=seed) * 10**seed)
    logra = Logra(config, [(weight, False) for weight in weights], buffers, RankGroups())
    before = [weight.weight.detach().clone() for weight in weights]
    direction = logra.prepare()
    logra.apply(direction.eta)
    moved = sum((w.weight.data - b).square().sum() for w, b in zip(weights, before)) ** 0.5
    whole = sum(b.square().sum() for b in before) ** 0.5
    torch.testing.assert_close(moved / whole, torch.tensor(1e-3, dtype=torch.float64), rtol=1e-9, atol=0)
    assert logra.steps_taken == 1 and logra.find_nonfinite() == []
    assert logra.state_bytes() == {"sketches": 2 * ROWS * RANK * 8, "optimizer": 2 * ROWS * 8, "projections": 0}
    weights[1].sketch.sketch[0, 0] = float("inf")
    assert logra.find_nonfinite() == ["w"]
