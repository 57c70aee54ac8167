"""The loss that trains the indexer of sparse attention: index scores should rank keys as the attention itself weighs them.

For one query, p is the mean over heads of the main attention's probabilities over the selected keys (they sum to 1; a
constant), and q the softmax of its index scores over the same keys. The loss is the sum over queries of weight x
KL(p || q). Keys that were not selected have no part in it.

The gradient of a score is weight x (q - p), known as soon as the log-sum-exps are: loss and gradients come from one pass,
and no autograd node is needed. Ranks exchange as in `sparse`: each gathers the block's queries (in sub-blocks), works on
the selected keys that *it* owns, and a query's owner puts the parts of the sums together (log-sum-exp of the scores; sums
of p, p log p and p x score). Key gradients stay with the keys; those of queries and head weights are summed at the owner.

No buffer is larger than `elements_at_once`, but for two numbers for each selected key of a sub-block.

Left out: a loss over all keys; a fused kernel.

B batch, H query heads, I index heads, R rows a rank, W = ranks x R, S queries, M own tokens, N rows of a source,
L selected rows of a source, D latent key width, E index dim.
"""

from contextlib import ExitStack
from dataclasses import dataclass

import torch

from longstraw.attention.exchange import gather_rows, scatter_rows
from longstraw.attention.layout import BlockLayout
from longstraw.attention.selection import Selection
from longstraw.attention.sparse import LatentPages, cut_queries, over_batch, row_probabilities
from longstraw.attention.wide_heads import matmul_wide


@dataclass(frozen=True)
class IndexerLossGeometry:
    """What the loss needs besides tensors.

    scale: softmax scale of the main attention. relu: of the index scores. rows_at_once: that of the selection.
    latents, index: earlier pages in the order of positions, row for row the same tokens. elements_at_once: bounds the
    gathered rows.
    """

    layout: BlockLayout
    scale: float
    relu: bool
    rows_at_once: int
    latents: tuple[LatentPages, ...]
    index: tuple[LatentPages, ...]
    elements_at_once: int = 2**24


@dataclass(frozen=True)
class MainAttention:
    """What the target is made of: absorbed queries [B, H, R, D], own latents [B, M, D], and the log-sum-exp [B, H, R] over
    all selected keys, whoever owns them."""

    q: torch.Tensor
    latents: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class IndexerGradients:
    """The loss of this rank's rows (a scalar), and the gradients of index queries [B, I, R, E], head weights [B, I, R] and
    own index keys [B, M, E]; all float32 or wider."""

    loss: torch.Tensor
    q: torch.Tensor
    weights: torch.Tensor
    k: torch.Tensor


def score_rows(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, rows: torch.Tensor, relu: bool, elements: int
) -> torch.Tensor:
    """Index scores of q [S, I, E], weights [S, I] and the rows [S, L] of keys [N, E] -> [S, L]; -inf for rows of -1."""
    scores = []
    for part in cut_queries(q, rows, elements):
        products = _products(q[part], keys[rows[part].clamp(min=0)], relu)
        found = products.mul_(weights[part].to(products.dtype)[..., None]).sum(1)
        scores.append(found.masked_fill_(rows[part] < 0, -torch.inf))
    return torch.cat(scores)


def score_rows_bwd(
    ds: torch.Tensor, q: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor,
    adjoint: torch.Tensor | None, relu: bool, elements: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of q and weights, given those of `score_rows`, ds [S, L] (0 for rows of -1).

    The keys' gradients are added to adjoint [N, E], unless it is None.
    """
    dqs, dweights = [], []
    for part in cut_queries(q, rows, elements):
        at = rows[part].clamp(min=0)
        picked = keys[at]
        products = _products(q[part], picked, relu)
        dweights.append((products * ds[part][:, None]).sum(-1))
        dproducts = ds[part][:, None] * weights[part].to(products.dtype)[..., None]
        if relu:
            dproducts.masked_fill_(products <= 0, 0.0)
        dqs.append(matmul_wide(dproducts, picked))
        if adjoint is not None:  # rows of -1 add zeros to row 0
            d_picked = matmul_wide(dproducts.transpose(1, 2), q[part])
            adjoint.index_add_(0, at.flatten(), d_picked.flatten(0, 1))
    return torch.cat(dqs), torch.cat(dweights)


def _products(q: torch.Tensor, picked: torch.Tensor, relu: bool) -> torch.Tensor:
    """q [S, I, E], picked [S, L, E] -> [S, I, L]."""
    products = matmul_wide(q, picked.transpose(1, 2))
    return products.relu_() if relu else products


def target_rows(
    q: torch.Tensor, lse: torch.Tensor, latents: torch.Tensor, rows: torch.Tensor, scale: float, elements: int
) -> torch.Tensor:
    """The mean over heads of the main attention's probabilities of rows [S, L]; q [S, H, D], lse [S, H]; 0 for rows of -1."""
    found = []
    for part in cut_queries(q, rows, elements):
        picked = latents[rows[part].clamp(min=0)]
        found.append(row_probabilities(q[part], picked, rows[part], lse[part], scale)[0].mean(1))
    return torch.cat(found)


@torch.no_grad()
def differentiate_indexer(
    q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, main: MainAttention, row_weights: torch.Tensor,
    selection: Selection, geometry: IndexerLossGeometry,
) -> IndexerGradients:
    """Index queries q [B, I, R, E], head weights [B, I, R], own index keys k [B, M, E], row weights [B, R] -> gradients.

    row_weights: what each row's divergence is multiplied by; 0 for padding. Gradients of earlier index keys are added to
    the adjoints of their pages. Every rank of the layout's group calls it.
    """
    layout, wide = geometry.layout, torch.promote_types(q.dtype, torch.float32)
    row_weights = row_weights.type(wide)  # not `.to`, which a float64 audit makes the identity
    dk, loss = torch.zeros(k.shape, dtype=wide, device=q.device), torch.zeros((), dtype=wide, device=q.device)
    index = [pages.read() if pages.rows else None for pages in geometry.index] + [k]
    latents = [pages.read() if pages.rows else None for pages in geometry.latents] + [main.latents]
    dqs = []
    with ExitStack() as stack:
        adjoints = [stack.enter_context(pages.adjoint()) if pages.rows else None for pages in geometry.index] + [dk]
        for (a, b), rows in zip(layout.sub_blocks(geometry.rows_at_once), selection.parts, strict=True):
            queries = _gather_queries(q, weights, layout, a, b, wide)
            pairs = _score_selected(queries, _gather_main(main, layout, a, b, wide), index, latents, rows, geometry)
            part, numbers = _merge_sums(_local_sums(pairs, queries[1]), row_weights[:, a:b], layout)
            loss += part
            grads = _local_bwd(queries, pairs, numbers, index, adjoints, rows, geometry).movedim(1, 2)
            dqs.append(scatter_rows(grads, layout).sum(0))
    dq, dweights = torch.cat(dqs, 2).split([q.shape[-1], 1], -1)
    return IndexerGradients(loss, dq, dweights[..., 0], dk)


def _gather_queries(q, weights, layout, a, b, wide):
    """Rows [a, b) of every rank: index queries [B, W, I, E] and head weights [B, W, I]."""
    head_weights = gather_rows(weights[:, :, a:b, None].to(wide), layout)[..., 0]
    return gather_rows(q[:, :, a:b], layout).transpose(1, 2), head_weights.transpose(1, 2)


def _gather_main(main, layout, a, b, wide):
    """Rows [a, b) of every rank: main queries [B, W, H, D] and log-sum-exps [B, W, H]."""
    lse = gather_rows(main.lse[:, :, a:b, None].to(wide), layout)[..., 0]
    return gather_rows(main.q[:, :, a:b], layout).transpose(1, 2), lse.transpose(1, 2)


def _score_selected(queries, main, index, latents, selected, geometry):
    """(scores, target) [B, W, L] of each source; None where the block selects nothing of it here."""

    def score(index_keys, latent_keys, q, weights, main_q, lse, rows):
        scores = score_rows(q, weights, index_keys, rows, geometry.relu, geometry.elements_at_once)
        return scores, target_rows(main_q, lse, latent_keys, rows, geometry.scale, geometry.elements_at_once)

    return [
        over_batch(score, (index_keys, latent_keys), (*queries, *main, rows)) if rows.numel() else None
        for index_keys, latent_keys, rows in zip(index, latents, selected, strict=True)
    ]


def _local_sums(pairs, like: torch.Tensor) -> torch.Tensor:
    """What this rank's keys add for each query: log-sum-exp of scores, sums of p, p log p and p x score: [B, W, 4]."""
    sums = like.new_zeros(*like.shape[:2], 4)
    sums[..., 0] = -torch.inf
    for scores, p in filter(None, pairs):
        sums[..., 0] = torch.logaddexp(sums[..., 0], scores.logsumexp(-1))
        sums[..., 1] += p.sum(-1)
        sums[..., 2] += torch.xlogy(p, p).sum(-1)
        sums[..., 3] += (p * scores.masked_fill(scores == -torch.inf, 0.0)).sum(-1)
    return sums


def _merge_sums(sums: torch.Tensor, row_weights: torch.Tensor, layout: BlockLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Local sums [B, W, 4] and own row weights [B, r] -> the loss of the own rows, and for all rows [B, W, 3] the
    log-sum-exp of scores, the row's weight, and the weight over the sum of p."""
    parts = scatter_rows(sums[:, None], layout)[:, :, 0]
    lse = parts[..., 0].logsumexp(0)
    total, entropy, cross = parts[..., 1:].sum(0).unbind(-1)  # total is 1 but for rounding
    divergence = (entropy - cross) / total - total.log() + lse
    numbers = torch.stack([lse, row_weights, row_weights / total], -1)
    return (row_weights * divergence).sum(), gather_rows(numbers[:, None], layout)[:, 0]


def _local_bwd(queries, pairs, numbers, index, adjoints, selected, geometry) -> torch.Tensor:
    """Gradients of the gathered queries and head weights, [B, W, I, E + 1], from this rank's keys, whose own gradients go to
    `adjoints`."""
    q, weights = queries
    lse, row_weights, p_weights = (t[..., None] for t in numbers.unbind(-1))
    grads = torch.zeros(*q.shape[:-1], q.shape[-1] + 1, dtype=weights.dtype, device=q.device)

    def backward(keys, adjoint, ds, q, weights, rows):
        return score_rows_bwd(ds, q, weights, rows, keys, adjoint, geometry.relu, geometry.elements_at_once)

    for keys, adjoint, pair, rows in zip(index, adjoints, pairs, selected, strict=True):
        if pair is None:
            continue
        scores, p = pair
        ds = (scores - lse).exp_().mul_(row_weights).sub_(p * p_weights)
        dq, dweights = over_batch(backward, (keys, adjoint), (ds, q, weights, rows))
        grads += torch.cat([dq, dweights[..., None]], -1)
    return grads
