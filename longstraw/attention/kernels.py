"""One attention call over one span of keys, with the log-sum-exp in the open.

Exact attention over pages needs two things of a kernel: the forward returns the log-sum-exp, so that partial outputs can
be merged; the backward takes the *global* output and log-sum-exp, so that each span's share of dK, dV and dQ is exact
(the flash backward recomputes probabilities as exp(score - lse): FlashAttention-2, Dao 2023, section 3.1.2).

B batch, H query heads, G key/value heads, S queries, N keys, D head dim. `causal` is only for a square of scores
(S == N, both at the same positions). Neither S nor N may be 0: callers skip such spans.

Backends, chosen by device and dtype: on the CPU aten's flash kernel; on CUDA aten's flash kernel for 16-bit dtypes,
its memory-efficient kernel for float32, and plain matrix products for float64. Heads wider than aten's kernels take
(`WIDEST_HEAD`; the latents of multi-latent attention) run in blocks of matrix products: see `wide_heads`.
"""

import torch

from longstraw.attention import device_kind
from longstraw.attention.wide_heads import wide_heads_bwd, wide_heads_fwd

KEYS_AT_ONCE = 2**15
"""Keys of one call on CUDA: the kernels there want a copy of the keys and values, and of their gradients, for every query
head that shares them, which for all pages of a long prompt would be more than the pages of all layers."""

WIDEST_HEAD = 256
"""The widest head of aten's flash kernel on CUDA."""

_aten = torch.ops.aten


def attend_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, H, S, D], k and v [B, G, N, D] -> output [B, H, S, D] and log-sum-exp [B, H, S] (float32 or wider)."""
    if not device_kind.computes_on_cuda(q):
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    if q.shape[-1] > WIDEST_HEAD:
        o, lse = wide_heads_fwd(q, k, v, causal, scale)
        return o.to(q.dtype), lse
    if q.dtype in (torch.bfloat16, torch.float16):
        k, v = _expand_heads(q, k), _expand_heads(q, v)
        return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
    if q.dtype is torch.float32:
        k, v = _expand_heads(q, k), _expand_heads(q, v)
        o, lse = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)[:2]
        return o, lse[..., : q.shape[2]]
    return _plain_fwd(q, k, v, causal, scale)


def attend_bwd(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients (dq, dk, dv) of this span, given the output o and log-sum-exp lse over *all* spans; shapes as inputs."""
    if not device_kind.computes_on_cuda(q):
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(do, q, k, v, o, lse, 0.0, causal, scale=scale)
    if q.shape[-1] > WIDEST_HEAD:
        return wide_heads_bwd(do, q, k, v, o, lse, causal, scale)
    if q.dtype in (torch.bfloat16, torch.float16):
        return _cuda_flash_bwd(do, q, k, v, o, lse, causal, scale)
    if q.dtype is torch.float32:
        return _cuda_efficient_bwd(do, q, k, v, o, lse, causal, scale)
    return _plain_bwd(do, q, k, v, o, lse, causal, scale)


def cut_keys(q: torch.Tensor, keys: int) -> list[slice]:
    """Spans of at most `KEYS_AT_ONCE` keys; on a CPU, whose kernel makes no copies, all of them."""
    step = KEYS_AT_ONCE if device_kind.computes_on_cuda(q) else max(keys, 1)
    return [slice(start, min(start + step, keys)) for start in range(0, keys, step)]


def attend_shared_fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend_fwd` without a mask; k and v of batch 1 are shared by q's whole batch (one kernel call for all of it)."""
    o, lse = attend_fwd(_fold_batch(q, k), k, v, False, scale)
    return _unfold_batch(o, q), _unfold_batch(lse[..., None], q)[..., 0]


def attend_shared_bwd(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`attend_bwd` without a mask; dk and dv of shared keys are summed over q's batch."""
    folded = [_fold_batch(t, k) for t in (do, q, o, lse[..., None])]
    dq, dk, dv = attend_bwd(folded[0], folded[1], k, v, folded[2], folded[3][..., 0], False, scale)
    return _unfold_batch(dq, q), dk, dv


def _fold_batch(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[B, H, S, D] -> [1, H, B * S, D] where the keys are shared by the batch."""
    if x.shape[0] == keys.shape[0]:
        return x
    return x.transpose(0, 1).flatten(1, 2)[None]


def _unfold_batch(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of `_fold_batch`, to the batch of `like` [B, H, S, D]."""
    if x.shape[0] == like.shape[0]:
        return x
    return x[0].unflatten(1, (like.shape[0], like.shape[2])).transpose(0, 1)


def _expand_heads(q: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """[B, G, N, D] -> [B, H, N, D]: the CUDA kernels of aten want as many key heads as query heads."""
    return t if t.shape[1] == q.shape[1] else t.repeat_interleave(q.shape[1] // t.shape[1], dim=1)


def _sum_heads(grad: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, H, N, D] -> [B, G, N, D]: the transpose of `_expand_heads`."""
    if grad.shape[1] == heads:
        return grad
    return grad.unflatten(1, (heads, -1)).sum(2)


def _cuda_flash_bwd(do, q, k, v, o, lse, causal, scale):
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
        do, q, _expand_heads(q, k), _expand_heads(q, v), o, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0,
        causal, state, state.new_zeros(()), scale=scale,
    )
    return dq, _sum_heads(dk, k.shape[1]), _sum_heads(dv, v.shape[1])


def _cuda_efficient_bwd(do, q, k, v, o, lse, causal, scale):
    padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf).contiguous()
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        do, q, _expand_heads(q, k), _expand_heads(q, v), None, o, padded, seed, seed, 0.0,
        [True, True, True, False], causal, scale=scale,
    )
    return dq, _sum_heads(dk, k.shape[1]), _sum_heads(dv, v.shape[1])


def _masked_scores(q, k, causal, scale):
    scores = (q @ _expand_heads(q, k).transpose(-1, -2)) * scale
    if causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(above, -torch.inf)
    return scores


def _plain_fwd(q, k, v, causal, scale):
    scores = _masked_scores(q, k, causal, scale)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ _expand_heads(q, v), lse


def _plain_bwd(do, q, k, v, o, lse, causal, scale):
    p = (_masked_scores(q, k, causal, scale) - lse[..., None]).exp()
    ds = p * (do @ _expand_heads(q, v).transpose(-1, -2) - (do * o).sum(-1, keepdim=True)) * scale
    dk, dv = ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ do
    return ds @ _expand_heads(q, k), _sum_heads(dk, k.shape[1]), _sum_heads(dv, v.shape[1])
