"""Attention of a block over its own keys and earlier pages, on one rank, against the naive form by positions.

float64 throughout: outputs, log-sum-exps, and every gradient, those that go to the pages' adjoints included.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw.attention import paged
from longstraw.attention.layout import BlockLayout
from longstraw.attention.naive import naive_attention
from longstraw.attention.geometry import AttentionGeometry
from longstraw.attention.paged import attend, paged_attention
from longstraw.prompt_state.pages import PageArena, PageView
from longstraw.prompt_state.residency import Staging
from tests.support.errors import relative_error

HEADS, GROUPS, DIM, SCALE = 4, 2, 8, 0.35
CPU = torch.device("cpu")


def draw(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def open_pages(spans, *, batch=1, residency="device", spare=0, seed=10):
    """One arena per length in `spans`, filled with random keys and values, with zero adjoints."""
    arenas, staging = [], Staging(CPU)
    for index, rows in enumerate(spans):
        arena = PageArena(
            segment=f"s{index}", layer_number=1, owner=0, capacity=rows + spare, residency=residency,
            adjoint_residency="device", staging=staging,
        )
        arena.append(*(draw(batch, GROUPS, rows, DIM, seed=seed + 2 * index + i) for i in range(2)))
        arena.open_adjoints(CPU)
        arenas.append(arena)
    return arenas


def geometry_of(arenas, tokens, *, unit=1, rows_at_once=4096, constant=()):
    start = sum(arena.rows for arena in arenas)
    layout = BlockLayout(start, tokens, unit=unit)
    views = tuple(PageView(arena, (arena.rows,), constant=index in constant) for index, arena in enumerate(arenas))
    return AttentionGeometry(layout, SCALE, rows_at_once, views)


def draw_block(batch, layout, seed=0):
    q = draw(batch, HEADS, layout.rows, DIM, seed=seed)
    k, v = (draw(batch, GROUPS, layout.mine, DIM, seed=seed + i) for i in (1, 2))
    return [t.requires_grad_() for t in (q, k, v)]


def reference(q, k, v, arenas, geometry, do):
    """(o, lse, dq, dk, dv, dK and dV of each arena) by autograd through the naive form; real rows only."""
    mine, batch = geometry.layout.mine, q.shape[0]
    leaves = [t.detach().clone().requires_grad_() for t in (q[:, :, :mine], k, v)]
    pages = [
        [t[:, :, : a.rows].detach().clone().requires_grad_() for t in a.tensors] for a in arenas if a.tensors
    ]
    keys, values = (
        torch.cat([*(p[i].expand(batch, -1, -1, -1) for p in pages), leaves[1 + i]], 2) for i in range(2)
    )
    start = geometry.layout.start
    o, lse = naive_attention(leaves[0], keys, values, torch.arange(start, start + mine), torch.arange(keys.shape[2]), SCALE)
    o.backward(do[:, :, :mine])
    return [o.detach(), lse.detach(), *(t.grad for t in leaves), *(t.grad for pair in pages for t in pair)]


def check(arenas, tokens, batch, *, unit=1, rows_at_once=4096, kept=False):
    geometry = geometry_of(arenas, tokens, unit=unit, rows_at_once=rows_at_once)
    layout = geometry.layout
    q, k, v = draw_block(batch, layout)
    do = draw(batch, HEADS, layout.rows, DIM, seed=5)
    do[:, :, layout.mine :] = 0  # nothing reads the padding rows
    o, lse = attend(q.detach(), k.detach(), v.detach(), geometry)
    assert o.isfinite().all(), "padding rows must be finite"
    out = paged_attention(q, k, v, geometry, (o, lse) if kept else None)
    assert torch.equal(out, o)
    out.backward(do)
    mine = layout.mine
    assert not q.grad[:, :, mine:].any()
    adjoints = [t[:, :, : a.rows] for a in arenas for t in a.adjoints]
    found = [o[:, :, :mine], lse[:, :, :mine], q.grad[:, :, :mine], k.grad, v.grad, *adjoints]
    expected = reference(q, k, v, arenas, geometry, do)
    assert relative_error(found, expected) < 1e-14
    for f, e in zip(found, expected):
        torch.testing.assert_close(f, e, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("spans", [(), (7,), (1, 12), (5, 0, 9), (0,)], ids=str)
@pytest.mark.parametrize("tokens", [1, 10])
def test_block_over_history(spans, tokens):
    check(open_pages(spans, spare=3), tokens, batch=1)


@pytest.mark.parametrize("rows_at_once", [1, 3, 7, 11])
@pytest.mark.parametrize("kept", [False, True])
def test_sub_blocks_of_rows(rows_at_once, kept):
    check(open_pages((6, 4)), 11, batch=2, rows_at_once=rows_at_once, kept=kept)


@pytest.mark.parametrize("keys_at_once", [1, 4, 9])
@pytest.mark.parametrize("residency", ["device", "host"])
def test_pages_a_piece_at_a_time(keys_at_once, residency, monkeypatch):
    """As on CUDA, where one call takes so many keys."""
    def cut(q, keys):
        return [slice(a, min(a + keys_at_once, keys)) for a in range(0, keys, keys_at_once)]

    monkeypatch.setattr(paged, "cut_keys", cut)
    check(open_pages((9, 5), residency=residency, spare=2), 7, batch=2, rows_at_once=3)


@pytest.mark.parametrize("batch", [2, 3])
def test_a_batch_shares_pages_of_batch_one(batch):
    """The shared pages' adjoints are the sum over the batch."""
    check(open_pages((9,)), 5, batch=batch)


def test_shared_pages_then_pages_of_the_batch():
    shared, own = open_pages((9,)), open_pages((4,), batch=3, seed=30)
    check([*shared, *own], 5, batch=3)


@settings(max_examples=30, deadline=None)
@given(
    spans=st.lists(st.integers(0, 9), max_size=3), tokens=st.integers(1, 12), batch=st.integers(1, 3),
    unit=st.integers(1, 4), rows_at_once=st.integers(1, 13), kept=st.booleans(),
    residency=st.sampled_from(["device", "host"]),
)
def test_any_sizes(spans, tokens, batch, unit, rows_at_once, kept, residency):
    arenas = open_pages(spans, residency=residency, spare=1)
    check(arenas, tokens, batch, unit=unit, rows_at_once=rows_at_once, kept=kept)


def test_adjoints_accumulate_over_blocks():
    """Two blocks that follow the same pages add to the same adjoints."""
    arenas, expected = open_pages((6,)), 0
    for seed in (0, 50):
        geometry = geometry_of(arenas, 4)
        q, k, v = draw_block(1, geometry.layout, seed)
        do = draw(1, HEADS, 4, DIM, seed=seed + 5)
        paged_attention(q, k, v, geometry).backward(do)
        expected = expected + reference(q, k, v, arenas, geometry, do)[-2]
    torch.testing.assert_close(arenas[0].adjoints[0], expected)


def test_constant_pages_get_no_adjoint():
    arenas = open_pages((6, 5))
    geometry = geometry_of(arenas, 4, constant=(0,))
    q, k, v = draw_block(1, geometry.layout)
    paged_attention(q, k, v, geometry).backward(draw(1, HEADS, 4, DIM, seed=5))
    assert not arenas[0].adjoints[0].any() and not arenas[0].adjoints[1].any()
    assert arenas[1].adjoints[0].any() and arenas[1].adjoints[1].any()


def test_kept_outputs_skip_the_forward(monkeypatch):
    """With kept outputs the replayed forward runs no kernel, and the gradients are the same bits."""
    arenas, grads = open_pages((6,)), []
    geometry = geometry_of(arenas, 7, rows_at_once=3)
    q, k, v = draw_block(2, geometry.layout)
    do = draw(2, HEADS, 7, DIM, seed=5)
    for kept in (None, attend(q.detach(), k.detach(), v.detach(), geometry)):
        arenas[0].adjoints[0].zero_()
        with monkeypatch.context() as patch:
            if kept is not None:
                patch.setattr(paged, "attend_fwd", None)  # calling it would raise
            out = paged_attention(q, k, v, geometry, kept)
        grads.append([*torch.autograd.grad(out, (q, k, v), do), arenas[0].adjoints[0].clone()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_wrong_kept_outputs_change_the_gradient():
    """The control of the test above: kept outputs are really used."""
    geometry = geometry_of(open_pages((6,)), 7)
    q, k, v = draw_block(1, geometry.layout)
    do = draw(1, HEADS, 7, DIM, seed=5)
    o, lse = attend(q.detach(), k.detach(), v.detach(), geometry)
    right, wrong = (
        torch.autograd.grad(paged_attention(q, k, v, geometry, pair), q, do)[0] for pair in ((o, lse), (o, lse + 1))
    )
    assert relative_error([wrong], [right]) > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_keep_wide_partials(dtype):
    """Error against float64 at most twice that of one softmax in the same dtype; log-sum-exp and adjoints in float32."""
    batch, tokens = 2, 33
    arenas = [
        PageArena(segment="s", layer_number=1, owner=0, capacity=40, residency="device", adjoint_residency="device",
                  staging=Staging(CPU))
        for _ in range(3)
    ]
    for index, arena in enumerate(arenas):
        arena.append(*(draw(1, GROUPS, 40, DIM, seed=20 + 2 * index + i).to(dtype) for i in range(2)))
        arena.open_adjoints(CPU)
        assert arena.adjoints[0].dtype is torch.float32
    geometry = geometry_of(arenas, tokens, rows_at_once=8)
    q, k, v = (t.detach().to(dtype).requires_grad_() for t in draw_block(batch, geometry.layout))
    do = draw(batch, HEADS, tokens, DIM, seed=5).to(dtype)
    o, lse = attend(q.detach(), k.detach(), v.detach(), geometry)
    assert lse.dtype is torch.float32 and o.dtype is dtype
    out = paged_attention(q, k, v, geometry)
    out.backward(do)
    found = [out.detach(), q.grad, k.grad, v.grad, arenas[0].adjoints[0], arenas[1].adjoints[1]]

    def dense(cast):
        leaves = [t.detach().to(cast).requires_grad_() for t in (q, k, v)]
        pages = [t.detach().to(cast).requires_grad_() for a in arenas for t in a.tensors]
        keys = torch.cat([*(p.expand(batch, -1, -1, -1) for p in pages[::2]), leaves[1]], 2)
        values = torch.cat([*(p.expand(batch, -1, -1, -1) for p in pages[1::2]), leaves[2]], 2)
        scores = (leaves[0] @ keys.repeat_interleave(2, 1).transpose(-1, -2)) * SCALE
        mask = torch.arange(keys.shape[2]) > 120 + torch.arange(tokens)[:, None]
        y = scores.masked_fill(mask, -torch.inf).softmax(-1) @ values.repeat_interleave(2, 1)
        y.backward(do.to(cast))
        return [y.detach(), *(t.grad for t in leaves), pages[0].grad, pages[3].grad]

    oracle, plain = dense(torch.float64), dense(dtype)
    assert relative_error(found, oracle) <= 2 * relative_error(plain, oracle)
