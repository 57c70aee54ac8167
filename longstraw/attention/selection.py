"""Exact top-k selection of keys by index scores (DeepSeek sparse attention), over pages that several ranks own.

The score of a query and a key is sum_h w_h relu(q_h . k) over the index heads (the relu is optional). Each query selects
its k highest-scored keys at or before its position; among equal scores the earlier position wins; with fewer than k keys
it selects all of them.

A score and a position make one int64 whose order is that rule (`pack_keys`), so all of them are distinct and the k-th
largest is a threshold. Each rank gathers the block's queries (in sub-blocks), takes the top k of the keys *it* owns, and
sends the list to the query's owner; the owner takes the k-th of all lists, and only that goes back. What a rank keeps are
row numbers in its own pages. No [block, prompt] tensor exists: scores are made for some queries and keys at a time. Keys
are scanned in the order of their positions, so a key enters a full list only with a score above the list's lowest: on the
CPU all others are left behind by one comparison (`_merge_better`).

The choice is the same on any number of ranks and in the reverse sweep, as far as scores are: those of one query and key
are equal bits in the forward and the reverse sweep, and may differ in the last bit between shapes of matrix products.

B batch, R rows a rank, W = ranks x rows, S queries, H index heads, D index dim, M tokens this rank owns, N rows of a
source, K keys to select, L <= K selected keys of one rank and source.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from longstraw.attention import device_kind
from longstraw.attention.exchange import gather_rows, scatter_rows
from longstraw.attention.layout import BlockLayout
from longstraw.attention.wide_heads import matmul_wide

NOTHING = torch.iinfo(torch.int64).min
"""The packed key of no key at all; smaller than any other."""

LAST_POSITION = 2**32 - 1
_SETTLED = 0x0101010101010101  # eight booleans that are true, as one number
_CPU_TILE = 1024  # keys of one matrix product on the CPU
_TILE = 64  # keys per matrix product are a multiple of it, and queries of 8: odd shapes take kernels that round otherwise


class IndexPages(Protocol):
    """Index keys that this rank owns from earlier blocks of one layer and one segment."""

    @property
    def rows(self) -> int: ...

    def read(self) -> torch.Tensor:
        """[B or 1, N, D] on the compute device; batch 1 is shared by the block's whole batch."""

    def positions(self) -> torch.Tensor:
        """Absolute positions [N] (int64) of the rows, ascending, on the compute device."""


@dataclass(frozen=True)
class SelectionGeometry:
    """What a selection needs besides tensors.

    top_k: keys that a query selects. relu: whether products are clipped at 0. rows_at_once: rows a rank whose queries are
    gathered at a time; the attention that uses the selection must have the same. history: earlier pages, in the order of
    positions. keys_at_once: keys whose scores are merged into the lists at a time. scores_at_once: (query, head, key)
    products of one step; None: few enough for a CPU's cache, or many for an accelerator. They bound the buffers.
    """

    layout: BlockLayout
    top_k: int
    relu: bool
    rows_at_once: int
    history: tuple[IndexPages, ...]
    keys_at_once: int = 8192
    scores_at_once: int | None = None


@dataclass(frozen=True)
class Selection:
    """The keys that a block's queries selected among those that this rank owns.

    parts[sub-block][source]: [B, W, L] int32 row numbers of the source, -1 for none, largest first. Sources are the pages
    of the history in order, and the block's own keys last. L is as wide as this rank, sub-block and source need; may be 0.
    """

    parts: tuple[tuple[torch.Tensor, ...], ...]

    def map(self, function) -> "Selection":
        """The same function on every tensor."""
        return Selection(tuple(tuple(function(rows) for rows in sources) for sources in self.parts))

    def tensors(self) -> list[torch.Tensor]:
        """All tensors."""
        return [rows for sources in self.parts for rows in sources]


def pack_keys(scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Scores and positions (broadcast to one shape; positions below 2**32) -> int64, ordered as the selection rule.

    Scores count in float32, -0.0 as 0.0. Larger is better: higher score, then earlier position.
    """
    bits = (scores.type(torch.float32) + 0.0).view(torch.int32)  # not `.to`, which a float64 audit makes the identity
    sortable = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats order by their bits the wrong way round
    return (sortable.to(torch.int64) << 32) | (LAST_POSITION - positions)


def unpack_positions(keys: torch.Tensor) -> torch.Tensor:
    """The positions in packed keys; meaningless in NOTHING."""
    return LAST_POSITION - (keys & LAST_POSITION)


def unpack_scores(keys: torch.Tensor) -> torch.Tensor:
    """The float32 scores in packed keys; NaN in NOTHING."""
    sortable = (keys >> 32).to(torch.int32)
    return (sortable ^ ((sortable >> 31) & 0x7FFFFFFF)).view(torch.float32)


def index_scores(q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, relu: bool) -> torch.Tensor:
    """q [S, H, D], weights [S, H], k [N, D] -> [S, N], float32 or wider."""
    queries, keys = len(q), len(k)
    q, k = (F.pad(t.flatten(1), (0, 0, 0, -len(t) % unit)) for t, unit in ((q, 8), (k, _TILE)))
    products = matmul_wide(q.view(1, -1, k.shape[1]), k.t()[None]).view(len(q), -1, len(k))[:queries]
    if relu:
        products.relu_()
    return products.mul_(weights.to(products.dtype)[..., None]).sum(1)[:, :keys]


def query_positions(layout: BlockLayout, a: int, b: int, device: torch.device) -> torch.Tensor:
    """Positions [W] of the gathered queries of rows [a, b) of every rank, in slot order."""
    slots = layout.start + torch.arange(layout.ranks, device=device)[:, None] * layout.rows
    return (slots + torch.arange(a, b, device=device)).flatten()


@torch.no_grad()
def select(q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, geometry: SelectionGeometry) -> Selection:
    """Index queries q [B, H, R, D], weights [B, H, R], own index keys k [B, M, D] -> this rank's part of the selection.

    Every rank of the layout's group calls it.
    """
    layout, parts = geometry.layout, []
    own_positions = layout.start + layout.first + torch.arange(layout.mine, device=k.device)
    sources = [(pages.read(), pages.positions()) if pages.rows else (None, None) for pages in geometry.history]
    sources.append((k, own_positions))
    for a, b in layout.sub_blocks(geometry.rows_at_once):
        queries = gather_rows(q[:, :, a:b], layout).transpose(1, 2)
        gathered = gather_rows(weights[:, :, a:b, None], layout)[..., 0].transpose(1, 2)
        at = query_positions(layout, a, b, q.device)
        best = _best_local(queries, gathered, at, sources, geometry)
        if layout.ranks > 1:
            best = _keep_global(best, geometry)
        parts.append(_split_rows(best, [positions for _, positions in sources]))
    return Selection(tuple(parts))


def select_everything(
    layout: BlockLayout, rows_at_once: int, history: tuple[IndexPages, ...], batch: int, device: torch.device
) -> Selection:
    """What `select` gives for a block that ends within the first top-k tokens: every key at or before the query."""
    own, parts = layout.start + layout.first + torch.arange(layout.mine, device=device), []
    numbers = [torch.arange(n, dtype=torch.int32, device=device) for n in (*(pages.rows for pages in history), layout.mine)]
    for a, b in layout.sub_blocks(rows_at_once):
        at = query_positions(layout, a, b, device)
        causal = numbers[-1].masked_fill(own > at[:, None], -1)
        parts.append(tuple(rows.expand(batch, len(at), -1) for rows in (*numbers[:-1], causal)))
    return Selection(tuple(parts))


def _best_local(q, weights, at, sources, geometry) -> torch.Tensor:
    """The top keys of what this rank owns, packed, best first: [B, W, min(K, owned)]."""
    best = torch.empty(*q.shape[:2], 0, dtype=torch.int64, device=q.device)
    for index, (keys, positions) in enumerate(sources):
        if keys is None or keys.shape[1] == 0:
            continue
        causal = index == len(sources) - 1  # earlier pages come before every query of the block
        if keys.shape[0] == q.shape[0]:
            merged = [
                _scan(best[i], q[i], weights[i], at if causal else None, keys[i], positions, geometry)
                for i in range(len(q))
            ]
            best = torch.stack(merged)
        else:  # pages shared by the batch: one scan for all of it
            flat = [t.flatten(0, 1) for t in (best, q, weights)]
            best = _scan(*flat, None, keys[0], positions, geometry).unflatten(0, q.shape[:2])
    return best


def _scan(best, q, weights, at, keys, positions, geometry) -> torch.Tensor:
    """Merge the keys of one source into the running best [S, .] of queries q [S, H, D]; at [S]: with a causal mask."""
    on_cpu, step = not device_kind.computes_on_cuda(q), geometry.keys_at_once
    tile = min(step, len(keys), _CPU_TILE if on_cpu else step)
    queries_at_once = max(1, (geometry.scores_at_once or (2**19 if on_cpu else 2**24)) // (q.shape[1] * tile))
    merged = []
    for a in range(0, len(q), queries_at_once):
        rows = slice(a, a + queries_at_once)
        top, limits, c = best[rows], None if at is None else at[rows, None], 0
        while c < len(keys):
            full = top.shape[1] == geometry.top_k
            span = slice(c, c + (step if full else tile))  # a list with places free takes all of them: few, at first
            scores = torch.cat(
                [index_scores(q[rows], weights[rows], part, geometry.relu) for part in keys[span].split(tile)], 1
            )
            merge = _merge_better if on_cpu and full else _merge
            top, c = merge(top, scores, positions[span], limits, geometry.top_k), span.stop
        merged.append(top)
    return torch.cat(merged)


def _merge(best, scores, positions, limits, k) -> torch.Tensor:
    """best [S, .], packed and largest first, with keys of scores [S, N] and positions [N], later than those of `best`.

    limits [S, 1]: the last position that a query sees; None: all.
    """
    packed = pack_keys(scores, positions)
    if limits is not None:
        packed.masked_fill_(positions > limits, NOTHING)
    return _largest(torch.cat([best, packed], 1), k)


def _merge_better(best, scores, positions, limits, k) -> torch.Tensor:
    """As `_merge`, of full lists: only keys with a higher score than the lowest of a list are packed, eight neighbours each.

    What it packs has a shape that depends on the scores: on an accelerator the host would have to wait for it.
    """
    keys = scores.shape[1]
    settled = scores.type(torch.float32) <= unpack_scores(best[:, -1:])  # a tie goes to the earlier position; NaN is not
    settled = F.pad(settled, (0, -keys % 8), value=True).view(torch.int64) == _SETTLED
    queries, groups = settled.logical_not_().nonzero(as_tuple=True)
    if len(queries) == 0:
        return best
    columns = groups[:, None] * 8 + torch.arange(8)
    hidden, columns = columns >= keys, columns.clamp_(max=keys - 1)
    at = positions[columns]
    if limits is not None:
        hidden |= at > limits[queries]
    packed = pack_keys(scores[queries[:, None], columns], at).masked_fill_(hidden, NOTHING)
    touched, list_of, counts = torch.unique_consecutive(queries, return_inverse=True, return_counts=True)
    place = torch.arange(len(queries)) - (counts.cumsum(0) - counts)[list_of]
    lists = packed.new_full((len(touched), int(counts.amax()), 8), NOTHING)
    lists[list_of, place] = packed
    return best.index_copy(0, touched, _largest(torch.cat([best[touched], lists.flatten(1)], 1), k))


def _largest(keys: torch.Tensor, k: int) -> torch.Tensor:
    """The k largest along the last dim (all, where there are fewer), largest first."""
    return keys.topk(min(k, keys.shape[-1]), dim=-1).values


def _keep_global(best: torch.Tensor, geometry: SelectionGeometry) -> torch.Tensor:
    """Local lists [B, W, .] -> those of their keys that are among the top k of all ranks; NOTHING elsewhere."""
    layout = geometry.layout
    width = min(geometry.top_k, layout.start + layout.length)  # the same on every rank: exchanges are even
    lists = F.pad(best, (0, width - best.shape[2]), value=NOTHING)
    lists = scatter_rows(lists[:, None], layout)[:, :, 0]  # [ranks, B, R, width] of this rank's own queries
    threshold = _largest(lists.movedim(0, 2).flatten(2), width)[..., -1:]
    threshold = gather_rows(threshold[:, None], layout)[:, 0]
    keep = best >= threshold
    longest = int((keep & (best != NOTHING)).sum(-1).amax()) if best.numel() else 0
    return best.masked_fill(~keep, NOTHING)[..., :longest]


def _split_rows(best: torch.Tensor, positions: list[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    """Packed keys [B, W, .] -> row numbers [B, W, L] in each source, by the source's positions."""
    at, found = unpack_positions(best), []
    for source in positions:
        if source is None or len(source) == 0 or best.numel() == 0:
            found.append(torch.empty(*best.shape[:2], 0, dtype=torch.int32, device=best.device))
            continue
        inside = (best != NOTHING) & (at >= source[0]) & (at <= source[-1])
        rows = torch.where(inside, torch.searchsorted(source, at), -1)
        found.append(rows.to(torch.int32).sort(-1, descending=True).values)
    widths = [(rows >= 0).sum(-1).amax() if rows.numel() else at.new_zeros(()) for rows in found]
    widths = torch.stack(widths).tolist()  # one wait for the device
    return tuple(rows[..., :width].contiguous() for rows, width in zip(found, widths))
