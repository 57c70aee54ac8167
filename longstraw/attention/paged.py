"""Exact attention of a block over its own keys and all earlier pages, whoever owns them.

Each rank gathers the block's queries (in sub-blocks, so that the buffer is bounded), attends to the pages *it* owns, and
one exchange merges the partial outputs by log-sum-exp. The backward sends (q, dO, O, LSE) the same way: with the global
output and log-sum-exp each rank's dK and dV are exact and stay where the pages are (they are added to the pages'
adjoints); dQ is summed over the ranks at the owner of the query.

A block's own keys are a causal square and full rectangles, never a mask: see `local_spans`. Where fewer bytes move that way,
the keys go to the queries instead (`longstraw.attention.passed_keys`): `AttentionGeometry.passes_keys` decides.

B batch, H query heads, G key/value heads, R rows a rank, W = ranks x rows, M tokens this rank owns, N pages' rows,
D head dim.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from longstraw.attention.exchange import gather_rows, merge_into, merge_partials, scatter_rows
from longstraw.attention.geometry import AttentionGeometry, Pages
from longstraw.attention.kernels import attend_bwd, attend_fwd, attend_shared_bwd, attend_shared_fwd, cut_keys
from longstraw.attention.passed_keys import attend_by_keys, attend_bwd_by_keys


@dataclass(frozen=True)
class _Span:
    """Query rows of a gathered sub-block against keys: of earlier pages, or own rows `keys` of this block."""

    queries: slice
    causal: bool
    pages: Pages | None = None
    keys: slice = slice(0)


def local_spans(geometry: AttentionGeometry, a: int, b: int) -> Iterator[_Span]:
    """The spans of this rank for the sub-block of rows [a, b): no mask, no empty span, no fully masked row."""
    layout, n = geometry.layout, b - a
    for pages in geometry.history:
        if pages.rows:
            yield _Span(slice(0, layout.ranks * n), False, pages)
    base, after = layout.slot * n, (layout.slot + 1) * n
    earlier = min(a, layout.mine)  # own keys before the sub-block
    square = max(0, min(b, layout.mine) - a)  # real rows of the sub-block: their scores are a causal square
    if layout.mine and layout.slot + 1 < layout.ranks:
        yield _Span(slice(after, layout.ranks * n), False, keys=slice(0, layout.mine))
    if earlier:
        yield _Span(slice(base, after), False, keys=slice(0, earlier))
    if square:
        yield _Span(slice(base, base + square), True, keys=slice(a, a + square))
        if square < n:  # padding rows: their values go nowhere, but they must be finite
            yield _Span(slice(base + square, after), False, keys=slice(a, a + square))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, geometry: AttentionGeometry
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, H, R, D], own keys and values k, v [B, G, M, D] -> output [B, H, R, D] and log-sum-exp [B, H, R].

    Not differentiable: `paged_attention` is. The output has q's dtype, the log-sum-exp float32 or wider.
    """
    if geometry.passes_keys(q, k, v):
        return attend_by_keys(q, k, v, geometry)
    outputs, lses = [], []
    for a, b in geometry.layout.sub_blocks(geometry.rows_at_once):
        queries = gather_rows(q[:, :, a:b], geometry.layout)
        o, lse = _attend_local(queries, k, v, geometry, a, b)
        if geometry.layout.ranks > 1:
            partials = scatter_rows(torch.cat([o, lse[..., None]], -1), geometry.layout)
            o, lse = merge_partials(partials[..., :-1], partials[..., -1])
        outputs.append(o.to(q.dtype))
        lses.append(lse)
    return _join_rows(outputs), _join_rows(lses)


def _attend_local(queries, k, v, geometry, a, b):
    """What this rank's keys give the gathered queries: o [B, H, W, D] and lse [B, H, W], float32 or wider."""
    wide = torch.promote_types(queries.dtype, torch.float32)
    o = lse = None
    for span in local_spans(geometry, a, b):
        part, part_lse = _attend_span(queries[:, :, span.queries], k, v, span, geometry.scale)
        if o is None and part.shape == queries.shape:  # the first span, of all rows: nothing to merge with
            o, lse = part.to(wide), part_lse
            continue
        if o is None:
            o, lse = _see_nothing(queries, wide)
        merge_into(o[:, :, span.queries], lse[:, :, span.queries], part, part_lse)
    return _see_nothing(queries, wide) if o is None else (o, lse)


def _see_nothing(queries, wide):
    o = torch.zeros(queries.shape, dtype=wide, device=queries.device)
    return o, torch.full(queries.shape[:3], -torch.inf, dtype=wide, device=queries.device)


def _join_rows(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _attend_span(q, k, v, span, scale):
    if span.pages is None:
        return attend_fwd(q, k[:, :, span.keys], v[:, :, span.keys], span.causal, scale)
    k, v = span.pages.read()
    first, *others = cut_keys(q, k.shape[2])
    o, lse = attend_shared_fwd(q, k[:, :, first], v[:, :, first], scale)
    if others:
        o = o.to(torch.promote_types(o.dtype, torch.float32))
    for rows in others:
        merge_into(o, lse, *attend_shared_fwd(q, k[:, :, rows], v[:, :, rows], scale))
    return o, lse


class _PagedAttention(torch.autograd.Function):
    """ctx holds tensors and the geometry only: anything that held the block's graph would close an uncollectable cycle."""

    @staticmethod
    def forward(ctx, q, k, v, geometry, kept):
        o, lse = attend(q, k, v, geometry) if kept is None else kept
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.geometry = geometry
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        dq, dk, dv = attend_bwd_over_pages(do, q, k, v, o, lse, ctx.geometry)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def attend_bwd_over_pages(do, q, k, v, o, lse, geometry):
    """Gradients dq [B, H, R, D], dk and dv [B, G, M, D] (float32 or wider); adds dK, dV of earlier pages to theirs."""
    layout = geometry.layout
    if geometry.passes_keys(q, k, v):
        return attend_bwd_by_keys(do, q, k, v, o, lse, geometry)
    wide = torch.promote_types(q.dtype, torch.float32)
    dk, dv = (torch.zeros(t.shape, dtype=wide, device=q.device) for t in (k, v))
    dqs = []
    for a, b in layout.sub_blocks(geometry.rows_at_once):
        queries, douts, outs, lses = _gather_queries(q, do.to(q.dtype), o, lse, layout, a, b)
        dq = torch.zeros(queries.shape, dtype=wide, device=q.device)
        for span in local_spans(geometry, a, b):
            parts = [t[:, :, span.queries] for t in (douts, queries, outs, lses)]
            dq[:, :, span.queries] += _span_bwd(*parts, k, v, dk, dv, span, geometry)
        dqs.append(scatter_rows(dq, layout).sum(0) if layout.ranks > 1 else dq)
    return _join_rows(dqs), dk, dv


def _gather_queries(q, do, o, lse, layout, a, b):
    """Rows [a, b) of every rank, in two exchanges; without ranks, views."""
    rows = [t[:, :, a:b] for t in (q, do, o)]
    if layout.ranks == 1:
        return *rows, lse[:, :, a:b]
    packed = gather_rows(torch.cat(rows, -1), layout)
    return *packed.split(q.shape[-1], -1), gather_rows(lse[:, :, a:b, None], layout)[..., 0]


def _span_bwd(do, q, o, lse, k, v, dk, dv, span, geometry):
    """dq of one span; its dk and dv go to the block's own (in place) or to the pages' adjoints."""
    if span.pages is None:
        dq, dks, dvs = attend_bwd(do, q, k[:, :, span.keys], v[:, :, span.keys], o, lse, span.causal, geometry.scale)
        dk[:, :, span.keys] += dks
        dv[:, :, span.keys] += dvs
        return dq
    k, v = span.pages.read()
    total = None
    for rows in cut_keys(q, k.shape[2]):
        dq, dks, dvs = attend_shared_bwd(do, q, k[:, :, rows], v[:, :, rows], o, lse, geometry.scale)
        span.pages.add_adjoint(dks, dvs, rows.start)
        total = dq if total is None else total.to(torch.promote_types(dq.dtype, torch.float32)).add_(dq)
    return total


def paged_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, geometry: AttentionGeometry,
    kept: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Differentiable attention of a block: q [B, H, R, D], own k and v [B, G, M, D] -> [B, H, R, D].

    kept: (output, log-sum-exp) of the same block from the forward sweep; with it the forward computes nothing, which is
    exact, since the backward needs only q, k, v, output and log-sum-exp.
    """
    return _PagedAttention.apply(q, k, v, geometry, kept)
