"""Attention of absorbed queries over selected latent rows, whoever owns them.

The exchange is that of `paged`: each rank gathers the block's queries (in sub-blocks), attends to the selected rows that
*it* owns, and the partial outputs are merged by log-sum-exp. A latent row is the key of all heads, and its first V
columns are their value. The backward sends (q, dO, sum dO O, LSE) the same way; with the global output and log-sum-exp
each rank's latent gradients are exact and stay with the rows, and dQ is summed at the owner of the query.

Gathered rows are made for some queries at a time: no buffer is larger than `elements_at_once`. On a CUDA device the
adjoints are added by atomics, in no fixed order.

Left out: a fused kernel; passing latents instead of queries where a block is longer than what is resident.

B batch, H query heads, R rows a rank, W = ranks x R, S queries, M own tokens, N rows of a source, L selected rows of a
source, D latent key width, V value width.
"""

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Protocol

import torch

from longstraw.attention.exchange import gather_rows, merge_into, merge_partials, scatter_rows
from longstraw.attention.geometry import Exchange
from longstraw.attention.layout import BlockLayout
from longstraw.attention.selection import Selection
from longstraw.attention.wide_heads import matmul_wide


class LatentPages(Protocol):
    """Latent rows that this rank owns from earlier blocks of one layer and one segment.

    rows, rows_of_ranks, batch and constant: as in `longstraw.attention.geometry.Pages`.
    """

    rows: int
    rows_of_ranks: tuple[int, ...]
    batch: int
    constant: bool

    def read(self) -> torch.Tensor:
        """[B or 1, N, D] on the compute device; batch 1 is shared by the block's whole batch."""

    def adjoint(self) -> AbstractContextManager[torch.Tensor | None]:
        """What to add to the rows' adjoints, in place: [B or 1, N, D], float32 or wider; None where they are constants."""


@dataclass(frozen=True)
class LatentGeometry:
    """What latent attention needs besides tensors; all that its autograd node keeps of its block.

    scale: softmax scale. value_dim: V. rows_at_once: rows a rank whose queries are gathered at a time.
    history: earlier pages, in the order of positions. elements_at_once: bounds the gathered rows. exchange: what goes
    between the ranks where all keys are attended to.
    """

    layout: BlockLayout
    scale: float
    value_dim: int
    rows_at_once: int
    history: tuple[LatentPages, ...]
    elements_at_once: int = 2**24
    exchange: Exchange = "auto"


def cut_queries(q: torch.Tensor, rows: torch.Tensor, elements: int) -> list[slice]:
    """Slices of the S queries, so that [., L, D] and [., H, L] stay within `elements`."""
    step = max(1, elements // (rows.shape[1] * max(q.shape[1:])))
    return [slice(a, a + step) for a in range(0, len(q), step)]


def row_probabilities(q, picked, rows, lse, scale):
    """q [S, H, D], picked [S, L, D], rows [S, L] -> exp(score - lse), [S, H, L], and lse [S, H].

    With lse None its own log-sum-exp is taken. Rows of -1 get 0.
    """
    scores = matmul_wide(q, picked.transpose(1, 2)).mul_(scale).masked_fill_((rows < 0)[:, None], -torch.inf)
    lse = scores.logsumexp(-1) if lse is None else lse
    return scores.sub_(lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp_(), lse


def attend_rows(
    q: torch.Tensor, latents: torch.Tensor, rows: torch.Tensor, value_dim: int, scale: float, elements: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [S, H, D], latents [N, D], rows [S, L] (-1: none) -> o [S, H, V], lse [S, H], float32 or wider.

    A query without a row has output 0 and log-sum-exp -inf.
    """
    outputs, lses = [], []
    for part in cut_queries(q, rows, elements):
        picked = latents[rows[part].clamp(min=0)]
        p, lse = row_probabilities(q[part], picked, rows[part], None, scale)
        outputs.append(matmul_wide(p, picked[..., :value_dim]))
        lses.append(lse)
    return torch.cat(outputs), torch.cat(lses)


def attend_rows_bwd(
    do: torch.Tensor, q: torch.Tensor, delta: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor, latents: torch.Tensor,
    adjoint: torch.Tensor | None, scale: float, elements: int,
) -> torch.Tensor:
    """dq [S, H, D] of these rows, given lse [S, H] and delta = sum dO O [S, H] over *all* rows; do [S, H, V].

    The rows' gradients are added to adjoint [N, D], unless it is None.
    """
    grads, value_dim = [], do.shape[-1]
    for part in cut_queries(q, rows, elements):
        at = rows[part].clamp(min=0)
        picked = latents[at]
        p, _ = row_probabilities(q[part], picked, rows[part], lse[part], scale)
        dp = matmul_wide(do[part], picked[..., :value_dim].transpose(1, 2))
        ds = dp.sub_(delta[part][..., None]).mul_(p).mul_(scale)
        grads.append(matmul_wide(ds, picked))
        if adjoint is not None:  # rows of -1 add zeros to row 0
            d_picked = matmul_wide(ds.transpose(1, 2), q[part])
            d_picked[..., :value_dim] += matmul_wide(p.transpose(1, 2), do[part])
            adjoint.index_add_(0, at.flatten(), d_picked.flatten(0, 1))
    return torch.cat(grads)


def over_batch(function, shared: tuple, tensors: tuple) -> tuple[torch.Tensor, ...]:
    """function(*shared[i], *tensors[i]) for each member i of the batch, stacked; pages of batch 1 in one call for all.

    shared: tensors [B or 1, N, .] (or None) of a source; tensors: [B, W, ...] of the queries.
    """
    batch, queries = tensors[0].shape[:2]
    if shared[0].shape[0] == 1:
        found = function(*(t if t is None else t[0] for t in shared), *(t.flatten(0, 1) for t in tensors))
        return tuple(t.unflatten(0, (batch, queries)) for t in found)
    members = [function(*(t if t is None else t[i] for t in shared), *(t[i] for t in tensors)) for i in range(batch)]
    return tuple(torch.stack(parts) for parts in zip(*members))


def _sources(latents: torch.Tensor, geometry: LatentGeometry) -> list[torch.Tensor | None]:
    return [pages.read() if pages.rows else None for pages in geometry.history] + [latents]


def attend_sparse(
    q: torch.Tensor, latents: torch.Tensor, selection: Selection, geometry: LatentGeometry
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, H, R, D], own latents [B, M, D] -> output [B, H, R, V] and log-sum-exp [B, H, R].

    Not differentiable: `sparse_attention` is. The output has q's dtype, the log-sum-exp float32 or wider.
    """
    layout, outputs, lses = geometry.layout, [], []
    sources = _sources(latents, geometry)
    for (a, b), rows in zip(layout.sub_blocks(geometry.rows_at_once), selection.parts, strict=True):
        queries = gather_rows(q[:, :, a:b], layout).transpose(1, 2)
        o, lse = _attend_local(queries, sources, rows, geometry)
        if layout.ranks > 1:
            partials = scatter_rows(torch.cat([o, lse[..., None]], -1).transpose(1, 2), layout)
            o, lse = merge_partials(partials[..., :-1], partials[..., -1])
        else:
            o, lse = o.transpose(1, 2), lse.transpose(1, 2)
        outputs.append(o.to(q.dtype))
        lses.append(lse)
    return torch.cat(outputs, 2), torch.cat(lses, 2)


def _attend_local(q, sources, selected, geometry):
    """What this rank's rows give the gathered queries [B, W, H, D]: o [B, W, H, V] and lse [B, W, H]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    o = torch.zeros(*q.shape[:3], geometry.value_dim, dtype=wide, device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)

    def attend(latents, queries, rows):
        return attend_rows(queries, latents, rows, geometry.value_dim, geometry.scale, geometry.elements_at_once)

    for latents, rows in zip(sources, selected, strict=True):
        if rows.numel():
            merge_into(o, lse, *over_batch(attend, (latents,), (q, rows)))
    return o, lse


class _SparseAttention(torch.autograd.Function):
    """ctx holds tensors and the geometry only: anything that held the block's graph would close an uncollectable cycle."""

    @staticmethod
    def forward(ctx, q, latents, selection, geometry, kept):
        o, lse = attend_sparse(q, latents, selection, geometry) if kept is None else kept
        ctx.save_for_backward(q, latents, o, lse)
        ctx.selection, ctx.geometry = selection, geometry
        return o

    @staticmethod
    def backward(ctx, do):
        q, latents, o, lse = ctx.saved_tensors
        dq, d_latents = attend_sparse_bwd(do, q, latents, o, lse, ctx.selection, ctx.geometry)
        return dq.to(q.dtype), d_latents.to(latents.dtype), None, None, None


def attend_sparse_bwd(do, q, latents, o, lse, selection, geometry):
    """Gradients dq [B, H, R, D] and of own latents [B, M, D] (float32 or wider); adds those of earlier pages to theirs."""
    layout = geometry.layout
    wide = torch.promote_types(q.dtype, torch.float32)
    d_latents = torch.zeros(latents.shape, dtype=wide, device=q.device)
    delta = (do.to(wide) * o.to(wide)).sum(-1)
    sources, dqs = _sources(latents, geometry), []
    with ExitStack() as stack:
        adjoints = [stack.enter_context(pages.adjoint()) if pages.rows else None for pages in geometry.history]
        adjoints.append(d_latents)
        for (a, b), rows in zip(layout.sub_blocks(geometry.rows_at_once), selection.parts, strict=True):
            gathered = _gather_queries(do.to(q.dtype), q, delta, lse, layout, a, b)
            dq = _local_bwd(gathered, sources, adjoints, rows, geometry).transpose(1, 2)
            dqs.append(scatter_rows(dq, layout).sum(0) if layout.ranks > 1 else dq)
    return torch.cat(dqs, 2), d_latents


def _gather_queries(do, q, delta, lse, layout, a, b):
    """Rows [a, b) of every rank as [B, W, H, ...], in two exchanges: do, q, delta, lse."""
    packed = gather_rows(torch.cat([do[:, :, a:b], q[:, :, a:b]], -1), layout).transpose(1, 2)
    numbers = gather_rows(torch.stack([delta[:, :, a:b], lse[:, :, a:b]], -1), layout).transpose(1, 2)
    return *packed.split([do.shape[-1], q.shape[-1]], -1), *numbers.unbind(-1)


def _local_bwd(gathered, sources, adjoints, selected, geometry):
    """dq [B, W, H, D] of this rank's rows, whose own gradients go to `adjoints`."""
    queries = gathered[1]
    dq = torch.zeros(queries.shape, dtype=gathered[2].dtype, device=queries.device)

    def backward(latents, adjoint, do, q, delta, lse, rows):
        return (attend_rows_bwd(do, q, delta, lse, rows, latents, adjoint, geometry.scale, geometry.elements_at_once),)

    for latents, adjoint, rows in zip(sources, adjoints, selected, strict=True):
        if rows.numel():
            dq += over_batch(backward, (latents, adjoint), (*gathered, rows))[0]
    return dq


def sparse_attention(
    q: torch.Tensor, latents: torch.Tensor, selection: Selection, geometry: LatentGeometry,
    kept: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Differentiable attention of a block over selected rows: q [B, H, R, D], own latents [B, M, D] -> [B, H, R, V].

    kept: (output, log-sum-exp) of the same block from the forward sweep; with it the forward computes nothing, which is
    exact.
    """
    return _SparseAttention.apply(q, latents, selection, geometry, kept)
