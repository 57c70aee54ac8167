"""What is passed between ranks: the bytes of either way, and the choice by them."""

from dataclasses import dataclass

import pytest
import torch

from longstraw.attention.geometry import AttentionGeometry
from longstraw.attention.layout import BlockLayout

HEADS, GROUPS, DIM, RANKS, ROWS = 24, 4, 256, 8, 512


@dataclass(frozen=True)
class Earlier:
    """As much of earlier pages as the choice looks at."""

    rows_of_ranks: tuple[int, ...]
    batch: int = 1
    constant: bool = False


def open_call(*history, exchange="auto", ranks=RANKS, batch=1):
    layout = BlockLayout(0, ranks * ROWS, ranks, 0)
    q = torch.empty(batch, HEADS, ROWS, DIM, dtype=torch.bfloat16, device="meta")
    k, v = (torch.empty(batch, GROUPS, ROWS, DIM, dtype=torch.bfloat16, device="meta") for _ in range(2))
    return AttentionGeometry(layout, 1.0, 4096, history, exchange), q, k, v


def test_bytes_of_queries_do_not_depend_on_what_is_resident():
    (short, q, k, v), (long, *_) = open_call(), open_call(Earlier((100_000,) * RANKS))
    assert short.bytes_by_queries(q, v) == long.bytes_by_queries(q, v)
    # forward: q in bf16, output and log-sum-exp in float32; backward: q, dO, O in bf16, log-sum-exp and dQ in float32
    each = 2 * DIM + 4 * (DIM + 1) + 3 * 2 * DIM + 4 * (DIM + 1)
    assert short.bytes_by_queries(q, v) == RANKS * (RANKS - 1) * HEADS * ROWS * each


def test_bytes_of_keys():
    """Each row's k and v twice in bf16, and its dK and dV in float32 unless it is a constant."""
    geometry, _, k, v = open_call(Earlier((700, *[650] * 7)), Earlier((30,) * RANKS, constant=True))
    rows = 8 * ROWS + 8 * 700 + 4 * 30
    assert geometry.bytes_by_keys(k, v) == RANKS * (RANKS - 1) * GROUPS * 2 * DIM * rows


def test_a_prompts_first_chunks_pass_keys_and_its_later_ones_queries():
    choices = [open_call(Earlier((blocks * ROWS,) * RANKS)) for blocks in range(12)]
    passed = [geometry.passes_keys(q, k, v) for geometry, q, k, v in choices]
    assert passed[0] and not passed[-1]
    assert passed == sorted(passed, reverse=True)


def test_a_batch_shares_the_keys_of_its_prompt():
    shared, separate = open_call(Earlier((4000,) * RANKS), batch=8), open_call(Earlier((4000,) * RANKS, batch=8), batch=8)
    assert shared[0].passes_keys(*shared[1:]) and not separate[0].passes_keys(*separate[1:])


@pytest.mark.parametrize("exchange, passes", [("keys", True), ("queries", False)])
def test_a_fixed_choice(exchange, passes):
    for history in ((), (Earlier((100_000,) * RANKS),)):
        geometry, *tensors = open_call(*history, exchange=exchange)
        assert geometry.passes_keys(*tensors) is passes


def test_one_rank_passes_nothing():
    geometry, *tensors = open_call(exchange="keys", ranks=1)
    assert not geometry.passes_keys(*tensors)
