"""Seconds from counts: rows, bounds, and the row that limits."""

import pytest

from longstraw.dry_run.counter import Cost, GroupSpan, PhaseCounts
from longstraw.dry_run.hardware import HARDWARE
from longstraw.dry_run.sampling import spread_weights
from longstraw.dry_run.time_model import received_bytes, time_phase

H200 = HARDWARE["H200"]


def test_an_operation_takes_the_longest_of_products_traffic_and_a_launch():
    counts = PhaseCounts()
    Cost(moved=10, kind=None, operations=0.0).add_to(counts, "device", 3)
    Cost(moved=int(1e9), kind=None, operations=0.0).add_to(counts, "device", 1)
    Cost(moved=1000, kind="attention", operations=1e12).add_to(counts, "device", 2)
    rows = counts.seconds["H200"]
    assert rows == {
        "launches": pytest.approx(3 * H200.launch),
        "memory": pytest.approx(1e9 / (H200.memory_bandwidth * H200.efficiencies.memory)),
        "attention": pytest.approx(2e12 / (H200.flops_16 * H200.efficiencies.attention)),
    }


def test_a_phase_is_bound_by_its_longest_row_and_estimated_by_their_sum():
    counts, spans = PhaseCounts(), {"cp": GroupSpan(8, 1), "ep": GroupSpan(32, 4)}
    Cost(moved=10, kind="matmul_16", operations=1e15).add_to(counts, "device", 1)
    counts.collectives.update({("cp", "all_gather", "bytes"): 8e9, ("cp", "all_gather", "calls"): 1})
    counts.collectives.update({("ep", "all_to_all", "bytes"): 32e9, ("ep", "all_to_all", "calls"): 1})
    found = time_phase(counts, spans, H200)
    assert found.bound == pytest.approx(max(1e15 / H200.flops_16, 7e9 / H200.link_bandwidth, 31e9 / H200.network_bandwidth))
    assert found.estimate == pytest.approx(sum(found.rows.values()))
    assert found.rows["exchange over ep"] > found.rows["exchange over cp"] and found.limit == "matmul"


def test_copies_to_the_device_hide_until_they_are_longest():
    counts = PhaseCounts()
    Cost(moved=10, kind="matmul_16", operations=1e15).add_to(counts, "device", 1)
    alone = time_phase(counts, {}, H200).estimate
    counts.copies_in = 1e9
    assert time_phase(counts, {}, H200).estimate == alone
    counts.copies_in = 1e12
    found = time_phase(counts, {}, H200)
    assert found.limit == "copies in" and found.estimate == found.rows["copies in"] > 10


@pytest.mark.parametrize("operation, received", [("all_gather", 7), ("reduce_scatter", 7), ("all_to_all", 7), ("all_reduce", 14),
                                                 ("broadcast", 8)])
def test_what_a_rank_receives(operation, received):
    assert received_bytes(operation, 8.0, 8) == received and received_bytes(operation, 8.0, 1) == 0


@pytest.mark.parametrize("chosen", [[0, 1, 7, 12], [0, 12], [0, 3, 4, 5, 12]])
def test_sampled_blocks_stand_for_all(chosen):
    """A cost that is linear between the blocks that run adds up to that of all blocks."""
    weights = spread_weights(chosen)
    assert sum(weights.values()) == 13
    assert sum(weight * (3 + 2 * block) for block, weight in weights.items()) == sum(3 + 2 * block for block in range(13))
