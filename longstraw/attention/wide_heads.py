"""Attention with heads wider than the fused kernels take, in blocks of matrix products.

The softmax runs online over blocks of keys, so that no buffer is larger than `scores_at_once` scores. Query heads that
share a key head become rows of one matrix product: the keys are never expanded.

B batch, H query heads, G key/value heads (H a multiple of G), S queries, N keys, D head dim.
"""

from collections.abc import Iterator

import torch

from longstraw.attention import device_kind

SCORES_AT_ONCE = 2**25
"""Scores of one block, over batch and heads."""


def matmul_wide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [X, m, k] @ b [X, k, n] in float32 or wider; 16-bit operands on a CUDA device stay 16-bit, with float32 sums."""
    if device_kind.computes_on_cuda(b) and b.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(a.to(b.dtype), b, out_dtype=torch.float32)
    wide = torch.promote_types(b.dtype, torch.float32)
    return a.to(wide) @ b.to(wide)


def _blocks(q: torch.Tensor, k: torch.Tensor, causal: bool, scores_at_once: int) -> Iterator[tuple[slice, slice]]:
    """(queries, keys) of each block; those above a causal diagonal are left out."""
    heads, (queries, keys) = q.shape[0] * q.shape[1], (q.shape[2], k.shape[2])
    per_head = max(1, scores_at_once // heads)
    key_step = min(keys, max(1, int(per_head**0.5)))
    query_step = max(1, per_head // key_step)
    for a in range(0, queries, query_step):
        for c in range(0, keys, key_step):
            if not causal or c < min(a + query_step, queries):
                yield slice(a, min(a + query_step, queries)), slice(c, min(c + key_step, keys))


def _fold(x: torch.Tensor, groups: int, part: slice) -> torch.Tensor:
    """[B, H, S, D] -> [B * G, (H / G) * s, D]: the heads of a group as rows."""
    return x[:, :, part].unflatten(1, (groups, -1)).flatten(2, 3).flatten(0, 1)


def _unfold(x: torch.Tensor, like: torch.Tensor, part: slice) -> torch.Tensor:
    """The inverse of `_fold`: [B * G, (H / G) * s, D] -> [B, H, s, D]."""
    batch, heads = like.shape[:2]
    return x.unflatten(1, (-1, part.stop - part.start)).reshape(batch, heads, part.stop - part.start, x.shape[-1])


def _scores(q, k, queries, keys, causal, scale):
    """Scaled scores [B * G, (H / G) * s, n] of one block, masked above the diagonal."""
    groups = k.shape[1]
    scores = matmul_wide(_fold(q, groups, queries), k[:, :, keys].flatten(0, 1).transpose(1, 2)).mul_(scale)
    if causal and keys.stop - 1 > queries.start:
        rows, columns = (torch.arange(part.start, part.stop, device=q.device) for part in (queries, keys))
        above = columns > rows[:, None]
        scores.unflatten(1, (-1, len(rows))).masked_fill_(above, -torch.inf)
    return scores


def wide_heads_fwd(q, k, v, causal: bool, scale: float, scores_at_once: int = SCORES_AT_ONCE):
    """q [B, H, S, D], k and v [B, G, N, D] -> output [B, H, S, D] and log-sum-exp [B, H, S], float32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    o = torch.zeros(*q.shape[:3], v.shape[-1], dtype=wide, device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
    for queries, keys in _blocks(q, k, causal, scores_at_once):
        scores = _scores(q, k, queries, keys, causal, scale)
        part_lse = scores.logsumexp(-1)
        seen = part_lse.masked_fill(part_lse == -torch.inf, 0.0)  # a row of the diagonal block may see none of its keys
        part = matmul_wide(scores.sub_(seen[..., None]).exp_(), v[:, :, keys].flatten(0, 1))
        part, part_lse = _unfold(part, q, queries), _unfold(part_lse[..., None], q, queries)[..., 0]
        old = lse[:, :, queries]
        new = torch.logaddexp(old, part_lse)
        o[:, :, queries].mul_((old - new).exp()[..., None]).add_(part * (part_lse - new).exp()[..., None])
        old.copy_(new)
    return o, lse


def wide_heads_bwd(do, q, k, v, o, lse, causal: bool, scale: float, scores_at_once: int = SCORES_AT_ONCE):
    """(dq, dk, dv) of this span, given the output and log-sum-exp over *all* spans; float32 or wider, shapes as inputs."""
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros(t.shape, dtype=wide, device=q.device) for t in (q, k, v))
    delta = (do.to(wide) * o.to(wide)).sum(-1, keepdim=True)
    groups = k.shape[1]
    for queries, keys in _blocks(q, k, causal, scores_at_once):
        q_rows, do_rows, lse_rows, delta_rows = (
            _fold(t, groups, queries) for t in (q, do, lse.to(wide)[..., None], delta)
        )
        p = _scores(q, k, queries, keys, causal, scale).sub_(lse_rows).exp_()
        dv[:, :, keys] += matmul_wide(p.transpose(1, 2), do_rows).view_as(dv[:, :, keys])
        dp = matmul_wide(do_rows, v[:, :, keys].flatten(0, 1).transpose(1, 2))
        ds = dp.sub_(delta_rows).mul_(p).mul_(scale)
        dk[:, :, keys] += matmul_wide(ds.transpose(1, 2), q_rows).view_as(dk[:, :, keys])
        dq[:, :, queries] += _unfold(matmul_wide(ds, k[:, :, keys].flatten(0, 1)), q, queries)
    return dq, dk, dv
