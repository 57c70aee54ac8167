"""The specification of sparse attention over latents: selection by a full sort, attention by a full mask.

Also multi-latent attention as it is usually written (keys and values expanded per head), which absorbed queries over
shared latents must equal.

B batch, H query heads, I index heads, S queries, N keys, D latent key width, V value width (first V columns of a key),
E index dim.
"""

import torch


def naive_scores(q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, relu: bool) -> torch.Tensor:
    """Index scores: q [B, I, S, E], weights [B, I, S], k [B, N, E] -> [B, S, N]."""
    products = torch.einsum("bise,bne->bisn", q, k)
    return torch.einsum("bisn,bis->bsn", products.relu() if relu else products, weights)


def naive_selection(
    scores: torch.Tensor, q_positions: torch.Tensor, k_positions: torch.Tensor, top_k: int
) -> torch.Tensor:
    """Scores [B, S, N], positions [S] and [N] (ascending) -> mask [B, S, N], true where the query selects the key.

    Of the keys at or before the query the `top_k` with the highest scores; among equal scores the earlier ones; all of
    them where there are no more.
    """
    after = k_positions[None, :] > q_positions[:, None]
    scores = (scores.type(torch.float32) + 0.0).masked_fill(after, -torch.inf)
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    return torch.zeros(scores.shape, dtype=torch.bool, device=scores.device).scatter_(-1, order, True) & ~after


def naive_sparse_attention(
    q: torch.Tensor, latents: torch.Tensor, mask: torch.Tensor, value_dim: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed queries q [B, H, S, D] over latents [B, N, D] where mask [B, S, N] -> ([B, H, S, V], lse [B, H, S])."""
    scores = torch.einsum("bhsd,bnd->bhsn", q, latents) * scale
    scores = scores.masked_fill(~mask[:, None], -torch.inf)
    return scores.softmax(-1) @ latents[:, None, :, :value_dim], scores.logsumexp(-1)


def naive_indexer_loss(
    scores: torch.Tensor, q: torch.Tensor, latents: torch.Tensor, mask: torch.Tensor, row_weights: torch.Tensor, scale: float
) -> torch.Tensor:
    """Index scores [B, S, N], main queries q [B, H, S, D] over latents [B, N, D], mask [B, S, N], row weights [B, S].

    Sum over the rows of weight x KL(p || softmax of the selected scores), where p is the mean over heads of the main
    attention's probabilities; differentiable in the scores alone.
    """
    main = torch.einsum("bhsd,bnd->bhsn", q.detach(), latents.detach()) * scale
    p = main.masked_fill(~mask[:, None], -torch.inf).softmax(-1).mean(1)
    log_q = scores.masked_fill(~mask, -torch.inf).log_softmax(-1).masked_fill(~mask, 0.0)
    return (row_weights * (torch.xlogy(p, p) - p * log_q).sum(-1)).sum()


def naive_expanded_attention(
    q: torch.Tensor, q_rotary: torch.Tensor, latents: torch.Tensor, up_k: torch.Tensor, up_v: torch.Tensor,
    mask: torch.Tensor, scale: float,
) -> torch.Tensor:
    """Multi-latent attention with a key and a value per head, not absorbed.

    q [B, H, S, E] and q_rotary [B, H, S, D - V], latents [B, N, D] (normalised latent, then rotary key), up_k
    [H, E, V] and up_v [H, F, V], mask [B, S, N] -> [B, H, S, F].
    """
    latent, rotary = latents.split([up_k.shape[-1], q_rotary.shape[-1]], -1)
    k, v = (torch.einsum("bnv,hev->bhne", latent, up) for up in (up_k, up_v))
    scores = (q @ k.transpose(-1, -2) + torch.einsum("bhsd,bnd->bhsn", q_rotary, rotary)) * scale
    return scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1) @ v
