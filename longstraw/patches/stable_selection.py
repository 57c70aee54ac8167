"""Megatron's sparse attention breaks ties as ours does: among equal index scores the earlier position wins.

`torch.topk` leaves open which of equal scores it takes, and equal scores are common: a relu gives exact zeros. A
conventional model and a stateful one of the same weights would attend to different tokens, and their gradients could not
be compared. Scores count in float32, as in `longstraw.attention.selection`.
"""

import functools

import torch
from megatron.core.transformer.experimental_attention_variant import dsa

from longstraw.patches.verify import require_attribute, require_source


def install_stable_selection() -> None:
    """Let Megatron's unfused DSAttention select by (score descending, position ascending). Safe to call twice.

    Raises PatchMismatch when the target in megatron-core is not what this was written for.
    """
    require_attribute(dsa, "fused_qk_topk_naive")
    original = dsa.fused_qk_topk_naive
    if hasattr(original, "_longstraw_original"):
        return
    require_source(original, "index_scores.topk(topk_k, dim=-1)", "masked_fill(topk_scores == float(\"-inf\"), -1)")
    require_source(dsa.DSAttention.forward, "fused_qk_topk_naive(")

    @functools.wraps(original)
    def select(q, k, weights, index_topk, *args, **kwargs):
        scores, indices = original(q, k, weights, index_topk, *args, **kwargs)
        rounded = scores.detach().type(torch.float32) + 0.0  # -0.0 ties with 0.0
        best = rounded.sort(dim=-1, descending=True, stable=True)
        at, values = (t[..., : indices.shape[-1]] for t in (best.indices, best.values))
        return scores, at.masked_fill(values == -torch.inf, -1)

    select._longstraw_original = original
    dsa.fused_qk_topk_naive = select
