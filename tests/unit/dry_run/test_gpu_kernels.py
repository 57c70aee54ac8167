"""A GPU's ways on shapes alone: which operations are reached, and what is refused."""

from contextlib import nullcontext

import pytest
import torch

from longstraw.attention import delta_rule, kernels, paged
from longstraw.attention.geometry import AttentionGeometry
from longstraw.attention.layout import BlockLayout
from longstraw.attention.wide_heads import matmul_wide
from longstraw.dry_run.counter import GroupSpan, OperationCounter
from longstraw.dry_run.forms import UnknownValue
from longstraw.dry_run.kernels import gpu_kernels
from longstraw.dry_run.shapes_only import ShapesOnly
from longstraw.prompt_state.pages import PageArena, PageView
from longstraw.prompt_state.residency import Staging

HEADS, GROUPS, DIM = 24, 4, 256


@pytest.fixture
def tracker():
    with ShapesOnly() as tracker, gpu_kernels(tracker):
        tracker.counter = OperationCounter(lambda group: ("all", GroupSpan(1, 1)))
        yield tracker


def unknown(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def attend_to(rows: int, *, residency: str = "device", grad: bool = True):
    """A block of 512 tokens after so many rows of pages, forward and backward."""
    arena = PageArena(
        segment="prompt", layer_number=1, owner=0, capacity=rows, residency=residency, adjoint_residency=residency,
        staging=Staging(torch.device("cpu")),
    )
    arena.append(*(unknown(1, GROUPS, rows, DIM) for _ in "kv"))
    arena.open_adjoints(torch.device("cpu"))
    geometry = AttentionGeometry(BlockLayout(rows, 512), DIM**-0.5, 4096, (PageView(arena, (rows,)),))
    q, k, v = unknown(1, HEADS, 512, DIM), unknown(1, GROUPS, 512, DIM), unknown(1, GROUPS, 512, DIM)
    out = paged.paged_attention(*(t.requires_grad_() for t in (q, k, v)), geometry)
    if grad:
        out.backward(torch.empty_like(out))
    return arena


def test_attention_costs_what_its_products_cost(tracker):
    with tracker.phase("work", "chunk_graph"), tracker.counter.phase("work"):
        attend_to(100_000)
    pairs = 512 * 100_000 + 512 * 512 / 2
    assert tracker.counter.read()["work"].operations["attention"] == (4 + 10) * HEADS * DIM * pairs


def test_expanded_keys_are_bounded(tracker):
    """What the kernels copy for each query head grows with the keys of one call, not with the pages."""
    beyond = []
    for rows in (4 * kernels.KEYS_AT_ONCE, 16 * kernels.KEYS_AT_ONCE):
        with tracker.phase(f"{rows}", "chunk_graph"):
            attend_to(rows)
        beyond.append(tracker.phases[f"{rows}"]["device"].categories["chunk_graph"])
    one_call = 4 * kernels.KEYS_AT_ONCE * HEADS * DIM * 2  # keys, values and their gradients
    assert beyond[0] == beyond[1] and one_call < beyond[0] < 1.3 * one_call


def test_host_pages_are_staged_and_their_copies_counted(tracker):
    with tracker.phase("work", "chunk_graph"), tracker.counter.phase("work"):
        attend_to(10_000, residency="host")
    page, peaks = 2 * 10_000 * GROUPS * DIM * 2, tracker.phases["work"]
    assert peaks["device"].categories["staging"] == page and "prompt_state" not in peaks["device"].categories
    assert peaks["host"].categories["prompt_state"] == page and peaks["host"].categories["adjoints"] == 2 * page
    counts = tracker.counter.read()["work"]
    assert counts.copies_in == page, "the forward's copy serves the backward"
    assert counts.copies_out == 2 * page, "the pages, and bfloat16 gradients"
    assert counts.host_traffic >= 5 * page, "float32 sums read and written, gradients read"


def test_a_piece_of_work_counts_again(tracker):
    counter, a, b = tracker.counter, unknown(8, 16), unknown(16, 4)
    with counter.phase("work"):
        a @ b
        before = counter.note()
        with counter.standing_for(2.5):
            a @ b
        counter.count_again(counter.since(before))
    assert counter.read()["work"].operations == {"matmul_16": (1 + 2 * 2.5) * 2 * 8 * 16 * 4}
    assert counter.read()["work"].kernels == 6


def test_products_of_16_bits_stay_so(tracker):
    a, b = unknown(1, 64, 128), unknown(1, 128, 32)
    with tracker.counter.phase("work"):
        assert matmul_wide(a, b).dtype == torch.float32
    assert tracker.counter.read()["work"].operations == {"matmul_16": 2 * 64 * 128 * 32}


def test_what_a_gpu_would_not_do_is_refused(tracker):
    q = unknown(1, 2, 4, 8, dtype=torch.float64)
    with pytest.raises(UnknownValue, match="attention by matrix products"):
        kernels.attend_fwd(q, q, q, False, 1.0)
    from longstraw.adapters import gated_delta_net

    arguments = [unknown(1, 70, 2, 4) for _ in range(3)] + [unknown(1, 70, 2) for _ in range(2)] + [unknown(1, 2, 4, 4)]
    for rule in (gated_delta_net.chunked_delta_rule, gated_delta_net.naive_delta_rule):
        with pytest.raises(UnknownValue, match="delta rule, which a GPU would not"):
            rule(*arguments)
    assert gated_delta_net.chunked_delta_rule is not delta_rule.chunked_delta_rule


def pass_state(tracker, chunks: int):
    """The counts and the peak of the recurrence over so many chunks."""
    J, C, K, V = 6, 32, 128, 128
    kinds = ([J, C, K], [J, C, K], [J, C, V], [J, C, K], [J, C, C], [J, C, 1], [J, C, 1], [J, 1, 1])
    inputs = [unknown(chunks, *shape, dtype=torch.float32) for shape in kinds]
    with tracker.phase("work", "chunk_graph"), tracker.counter.phase("work"):
        o, state = delta_rule._pass_state(*inputs, unknown(J, K, V, dtype=torch.float32))
    assert o.shape == (chunks, J, C, V) and state.shape == (J, K, V)
    return tracker.counter.read()["work"], tracker.phases["work"]["device"].bytes


def test_two_chunks_of_a_probe_stand_for_all():
    found = []
    for kernels_of in (gpu_kernels, lambda tracker: nullcontext()):
        with ShapesOnly() as tracker, kernels_of(tracker):
            tracker.counter = OperationCounter(lambda group: ("all", GroupSpan(1, 1)))
            found.append(pass_state(tracker, 8))
    (sampled, peak), (right, right_peak) = found
    assert sampled.operations == right.operations and sampled.traffic == right.traffic
    assert peak == pytest.approx(right_peak, rel=0.1)


def test_afterwards_everything_is_as_before():
    with ShapesOnly() as tracker, gpu_kernels(tracker):
        pass
    from longstraw.adapters import gated_delta_net

    assert gated_delta_net.chunked_delta_rule is delta_rule.chunked_delta_rule
    q = torch.ones(1, 2, 4, 8)
    assert kernels.attend_fwd(q, q, q, False, 1.0)[0].shape == q.shape and len(kernels.cut_keys(q, 10**9)) == 1
