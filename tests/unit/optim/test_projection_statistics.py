"""Entries of A behave like independent draws: means, variances, correlations of rows, columns, draws, names and seeds.

Fixed seeds, so nothing here is a matter of luck; bounds are those of independent draws.
"""

import math

import pytest
import torch

from longstraw.optim.projection import Projection, unscaled_columns

KINDS = ("rademacher", "gaussian")
ROWS, COLUMNS = 64, 8192


def draw(kind, **changes):
    drawn = Projection(**(dict(name="w", rank=ROWS, columns=COLUMNS, seed=1, draw=0, kind=kind) | changes))
    return unscaled_columns(drawn, 0, COLUMNS, dtype=torch.float32).double()


def assert_uncorrelated(a, b=None):
    """Correlations of a's rows (with b's) have the size that independent rows of n entries give: 1/sqrt(n)."""
    n = a.shape[1]
    found = a @ (a if b is None else b).t() / n
    if b is None:
        found = found[~torch.eye(len(a), dtype=torch.bool)]
    scaled = found.flatten() * math.sqrt(n)
    pairs = scaled.numel() / (2 if b is None else 1)
    assert abs(float(scaled.square().mean()) - 1) < 6 / math.sqrt(pairs)
    assert abs(float(scaled.mean())) < 5 / math.sqrt(pairs)
    assert float(scaled.abs().max()) < math.sqrt(2 * math.log(pairs)) + 2


@pytest.mark.parametrize("kind", KINDS)
def test_moments(kind):
    entries = draw(kind)
    count = entries.numel()
    assert abs(float(entries.mean())) < 4 / math.sqrt(count)
    assert float((entries.mean(0) * math.sqrt(ROWS)).square().mean() - 1) < 6 * math.sqrt(2 / COLUMNS)
    assert float((entries.mean(1) * math.sqrt(COLUMNS)).square().mean() - 1) < 6 * math.sqrt(2 / ROWS)
    fourth = {"rademacher": 1.0, "gaussian": 3.0}[kind]
    assert abs(float(entries.square().mean()) - 1) <= 4 * math.sqrt((fourth - 1) / count)
    assert abs(float(entries.pow(4).mean()) - fourth) <= (0.0 if kind == "rademacher" else 4 * math.sqrt(96 / count))
    assert abs(float(entries.pow(3).mean())) < 4 * math.sqrt({"rademacher": 1, "gaussian": 15}[kind] / count)


def test_gaussian_entries_follow_the_normal_distribution():
    entries = draw("gaussian").flatten().sort().values
    steps = torch.arange(1, len(entries) + 1) / len(entries)
    largest_gap = float((torch.special.ndtr(entries) - steps).abs().max())
    assert largest_gap < 1.6 / math.sqrt(len(entries))  # Kolmogorov-Smirnov, 1 in 80 is above


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_uncorrelated(kind):
    assert_uncorrelated(draw(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_columns_are_uncorrelated(kind):
    """Neighbours share a counter block and words; the first 512 columns, over 2048 rows."""
    drawn = Projection(name="w", rank=2048, columns=2048, seed=1, draw=0, kind=kind)
    assert_uncorrelated(unscaled_columns(drawn, 0, 512, dtype=torch.float32).double().t())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", [dict(draw=1), dict(seed=2), dict(name="x"), dict(draw=1, seed=0)])
def test_draws_seeds_and_names_are_uncorrelated(kind, change):
    assert_uncorrelated(draw(kind), draw(kind, **change))


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_four_entries_are_uncorrelated(kind):
    """Pairs of entries can be independent while four of them are not: bits of a linear generator are."""
    entries = draw(kind)
    pairs = entries * entries.roll(1, 0)
    quads = pairs * pairs.roll(64 if kind == "rademacher" else 4, 1)
    for product in (pairs, quads, quads * entries.roll(3, 0) * entries.roll(5, 1)):
        assert abs(float(product.mean())) < 5 / math.sqrt(product.numel())
        rows = product.mean(1) * math.sqrt(COLUMNS)
        assert float(rows.abs().max()) < 5


@pytest.mark.parametrize("poor", [
    lambda row: torch.stack([row.roll(shift) for shift in range(ROWS)]),  # shifted copies of one good row
    lambda row: torch.stack([row[torch.arange(COLUMNS) ^ (64 * shift)] for shift in range(ROWS)]),  # reordered
])
def test_a_poor_generator_is_seen(poor):
    with pytest.raises(AssertionError):
        assert_uncorrelated(poor(draw("rademacher")[0]))
