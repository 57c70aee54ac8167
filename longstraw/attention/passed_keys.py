"""Exact attention of a block where the keys go to the queries: the other way round than `longstraw.attention.paged`.

Every rank gathers all keys and values, in pieces of at most `rows_at_once` rows a rank, and attends with its own queries
only, so its outputs are whole and need no merge between ranks. The backward gathers them again, and sends each piece's dK
and dV to its owner, who sums them. Pages of earlier blocks are seen whole; of the block's own keys a rank sees those in
earlier slots whole, and its own as a causal square.

B batch, H query heads, G key/value heads, R rows a rank, M tokens this rank owns, N rows of a piece a rank, D key dim,
V value dim, P ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from longstraw.attention.exchange import merge_into
from longstraw.attention.geometry import AttentionGeometry, Pages
from longstraw.attention.kernels import attend_bwd, attend_fwd, attend_shared_bwd, attend_shared_fwd
from longstraw.attention.layout import BlockLayout, pad_rows
from longstraw.memory_scopes import memory_scope


@dataclass(frozen=True)
class _Piece:
    """Rows [start, start + width) that each rank owns, of some pages or (pages None) of the block itself.

    counts: how many of them each rank really has. visible: the ranks whose rows this rank's queries see.
    """

    start: int
    width: int
    counts: tuple[int, ...]
    visible: tuple[int, ...]
    pages: Pages | None


def _cut_pieces(geometry: AttentionGeometry) -> Iterator[_Piece]:
    """The pieces, the same on every rank but for what is visible."""
    layout, everyone = geometry.layout, tuple(range(geometry.layout.ranks))
    for pages in geometry.history:
        yield from _cut_rows(pages.rows_of_ranks, everyone, pages, geometry.rows_at_once)
    before = tuple(rank for rank in everyone if (rank - layout.rotation) % layout.ranks < layout.slot)
    yield from _cut_rows(tuple(map(layout.tokens_of, everyone)), before, None, geometry.rows_at_once)


def _cut_rows(rows, visible, pages, rows_at_once):
    for start in range(0, max(rows), rows_at_once):
        width = min(rows_at_once, max(rows) - start)
        yield _Piece(start, width, tuple(min(max(n - start, 0), width) for n in rows), visible, pages)


def attend_by_keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, geometry: AttentionGeometry
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, H, R, D], own keys and values k [B, G, M, D], v [B, G, M, V] -> output [B, H, R, V], log-sum-exp [B, H, R].

    The same result as passing queries, to rounding. Not differentiable. Collective over the layout's group.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    o = torch.zeros(*q.shape[:3], v.shape[-1], dtype=wide, device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
    for piece in _cut_pieces(geometry):
        pk, pv = _gather_piece(piece, k, v, geometry.layout)
        if pk.shape[2]:
            merge_into(o, lse, *attend_shared_fwd(q, pk, pv, geometry.scale))
    for rows, causal in _own_spans(geometry.layout):
        part = attend_fwd(q[:, :, rows], k, v, causal, geometry.scale)
        merge_into(o[:, :, rows], lse[:, :, rows], *part)
    return o.to(q.dtype), lse


def attend_bwd_by_keys(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    geometry: AttentionGeometry,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients dq [B, H, R, D], dk [B, G, M, D], dv [B, G, M, V] (float32 or wider); pages' dK, dV go to their adjoints."""
    wide = torch.promote_types(q.dtype, torch.float32)
    do, dq = do.to(q.dtype), torch.zeros(q.shape, dtype=wide, device=q.device)
    dk, dv = (torch.zeros(t.shape, dtype=wide, device=q.device) for t in (k, v))
    for piece in _cut_pieces(geometry):
        pk, pv = _gather_piece(piece, k, v, geometry.layout)
        grads = pk.new_zeros(0), pv.new_zeros(0)
        if pk.shape[2]:
            dq_part, *grads = attend_shared_bwd(do, q, pk, pv, o, lse, geometry.scale)
            dq += dq_part
        if piece.pages is not None and piece.pages.constant:
            continue
        dks, dvs = _return_grads(piece, pk, pv, grads, geometry.layout)
        if piece.pages is not None:
            piece.pages.add_adjoint(dks, dvs, piece.start)
        else:
            own = slice(piece.start, piece.start + dks.shape[2])
            dk[:, :, own] += dks
            dv[:, :, own] += dvs
    for rows, causal in _own_spans(geometry.layout):
        parts = [t[:, :, rows] for t in (do, q)], [t[:, :, rows] for t in (o, lse)]
        dq_part, dks, dvs = attend_bwd(*parts[0], k, v, *parts[1], causal, geometry.scale)
        dq[:, :, rows] += dq_part
        dk += dks
        dv += dvs
    return dq, dk, dv


def _own_spans(layout: BlockLayout) -> Iterator[tuple[slice, bool]]:
    """This rank's rows against its own keys: a causal square, and the padding rows, which must only be finite."""
    if layout.mine:
        yield slice(0, layout.mine), True
    if 0 < layout.mine < layout.rows:
        yield slice(layout.mine, layout.rows), False


@memory_scope("buffers")
def _gather_piece(piece: _Piece, k, v, layout: BlockLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a piece that this rank's queries see, [B or 1, G, N, D] and [.., V]; N may be 0."""
    pk, pv = (k, v) if piece.pages is None else piece.pages.read()
    rows = slice(piece.start, piece.start + piece.counts[layout.rank])
    mine = pad_rows(torch.cat([pk[:, :, rows], pv[:, :, rows]], -1), piece.width, 2).contiguous()
    everyone = mine.new_empty(layout.ranks, *mine.shape)
    dist.all_gather_into_tensor(everyone.flatten(0, 1), mine, group=layout.group)
    seen = [everyone[rank][:, :, : piece.counts[rank]] for rank in piece.visible]
    joined = torch.cat(seen, 2) if seen else mine[:, :, :0]
    keys, values = joined.split([k.shape[-1], v.shape[-1]], -1)
    return keys.contiguous(), values.contiguous()


@memory_scope("buffers")
def _return_grads(piece: _Piece, pk, pv, grads, layout: BlockLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Send each rank the dK and dV of its rows of the piece -> their sum over the ranks, for this rank's rows."""
    wide = torch.promote_types(pk.dtype, torch.float32)
    width = pk.shape[-1] + pv.shape[-1]
    out = torch.zeros(layout.ranks, *pk.shape[:2], piece.width, width, dtype=wide, device=pk.device)
    if pk.shape[2]:
        parts = torch.cat([grad.to(wide) for grad in grads], -1).split([piece.counts[r] for r in piece.visible], 2)
        for rank, part in zip(piece.visible, parts):
            out[rank, :, :, : part.shape[2]] = part
    received = torch.empty_like(out)
    dist.all_to_all_single(received, out, group=layout.group)
    mine = received.sum(0)[:, :, : piece.counts[layout.rank]]
    return mine[..., : pk.shape[-1]], mine[..., pk.shape[-1] :]
