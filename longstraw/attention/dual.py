"""Paged attention in forward mode: the derivative of a block's output along tangents of its queries, keys and values.

With P the probabilities, S the scores and o the output, tangents are marked by a dot:

    odot = (P * Sdot) v + P vdot - rowsum(P * Sdot) o,     Sdot = scale (qdot k^T + q kdot^T)

Like the forward, each rank sums over the keys that it owns, with the log-sum-exp of all; one exchange adds the parts.
Earlier pages are constants: a probe holds the state that the block follows. Queries always go to the keys, a block of
keys at a time; nothing here is differentiable in turn.

B batch, H query heads, G key/value heads, R rows a rank, W = ranks x rows, M own tokens, n keys of a block, D head dim.
"""

from collections.abc import Callable

import torch
from torch.autograd import forward_ad

from longstraw.attention.exchange import gather_rows, scatter_rows
from longstraw.attention.geometry import AttentionGeometry
from longstraw.attention.paged import attend, local_spans

KEYS_AT_ONCE = 1024


def has_tangent(*tensors: torch.Tensor) -> bool:
    """Whether a forward-mode derivative flows through any of the tensors."""
    return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def split_dual(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(value, tangent), zeros where there is none."""
    value, tangent = forward_ad.unpack_dual(x)
    return value, torch.zeros_like(value) if tangent is None else tangent


def apply_linear(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """function(x) for a linear function without a forward-mode rule of its own, such as an exchange between ranks."""
    if not has_tangent(x):
        return function(x)
    value, tangent = split_dual(x)
    return forward_ad.make_dual(function(value), function(tangent))


def attend_dual(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, geometry: AttentionGeometry) -> torch.Tensor:
    """Dual q [B, H, R, D], own k and v [B, G, M, D] -> dual output [B, H, R, D]."""
    (q, q_dot), (k, k_dot), (v, v_dot) = (split_dual(t.contiguous()) for t in (q, k, v))
    o, lse = attend(q, k, v, geometry)
    wide, layout, parts = torch.promote_types(q.dtype, torch.float32), geometry.layout, []
    for a, b in layout.sub_blocks(geometry.rows_at_once):
        queries, tangents, lses = (
            gather_rows(t[:, :, a:b].to(wide), layout) for t in (q, q_dot, lse[..., None])
        )
        total = torch.zeros(*queries.shape[:3], queries.shape[3] + 1, dtype=wide, device=q.device)
        for span in local_spans(geometry, a, b):
            rows = span.queries
            three = (queries[:, :, rows], tangents[:, :, rows], lses[:, :, rows])
            if span.pages is None:
                keys = [t[:, :, span.keys].to(wide) for t in (k, k_dot, v, v_dot)]
            else:
                page_keys, page_values = (t.to(wide) for t in span.pages.read())
                keys = [page_keys, None, page_values, None]
            total[:, :, rows] += _sum_span(*three, *keys, causal=span.causal, scale=geometry.scale)
        parts.append(scatter_rows(total, layout).sum(0) if layout.ranks > 1 else total)
    total = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    o_dot = total[..., :-1] - total[..., -1:] * o.to(wide)
    return forward_ad.make_dual(o, o_dot.to(o.dtype))


def _sum_span(q, q_dot, lse, k, k_dot, v, v_dot, *, causal: bool, scale: float) -> torch.Tensor:
    """[B, H, rows, D + 1]: (P * Sdot) v + P vdot, and the row sums of P * Sdot, over the keys of one span."""
    heads, total = q.shape[1], 0.0
    for start in range(0, k.shape[2], KEYS_AT_ONCE):
        some = slice(start, start + KEYS_AT_ONCE)
        keys, values = (_for_heads(t[:, :, some], heads, len(q)) for t in (k, v))
        p = (q @ keys.mT * scale - lse).exp()
        if causal:
            columns = torch.arange(start, start + keys.shape[2], device=q.device)
            p = p.masked_fill(columns > torch.arange(q.shape[2], device=q.device)[:, None], 0.0)
        s_dot = q_dot @ keys.mT
        if k_dot is not None:
            s_dot = s_dot + q @ _for_heads(k_dot[:, :, some], heads, len(q)).mT
        weighted = p * s_dot * scale
        part = weighted @ values
        if v_dot is not None:
            part = part + p @ _for_heads(v_dot[:, :, some], heads, len(q))
        total = total + torch.cat([part, weighted.sum(-1, keepdim=True)], -1)
    return total


def _for_heads(keys: torch.Tensor, heads: int, batch: int) -> torch.Tensor:
    """[B or 1, G, n, D] -> [B, H, n, D]: each key head for the query heads that share it."""
    return keys.repeat_interleave(heads // keys.shape[1], 1).expand(batch, -1, -1, -1)
