"""The specification of attention: softmax over the keys at or before each query's position, written out.

B batch, H query heads, G key/value heads (H a multiple of G), S queries, N keys, D head dim.
"""

import torch


def naive_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_positions: torch.Tensor, k_positions: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention by positions. q [B, H, S, D], k and v [B, G, N, D], positions [S] and [N] (int).

    Returns the output [B, H, S, D] in q's dtype and the log-sum-exp of the scaled scores [B, H, S], computed in q's
    dtype or float32, whichever is wider. A query that sees no key has output 0 and log-sum-exp -inf.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = (t.to(wide).repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = (q.to(wide) @ k.transpose(-1, -2)) * scale
    scores = scores.masked_fill(k_positions[None, :] > q_positions[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.where(lse[..., None] == -torch.inf, 0.0, (scores - lse[..., None]).exp())
    return (weights @ v).to(q.dtype), lse
