"""Fused kernels of a GPU as one operation each: the forms of their results, what they save, and what they need meanwhile.

The operations have no kernel here: they are for tensors without numbers, and the tests hold their forms to those of the engine's
own code for the CPU. The autograd functions save what the kernels save.

    delta rule   flash-linear-attention 0.3 in chunks of 64 tokens saves q, k, v, the running decays and the write strengths, the
                 inverse of each chunk's triangular system in k's dtype, and the start state; while it runs it needs w and u
                 of each token and the state before each chunk, and in the backward their gradients
    l2norm       flash-linear-attention's: saves x and one number a row
    scan         a loop over tiles of index keys as one operation: the best of the keys so far and of these
    rms norm     aten's `_fused_rms_norm` of CUDA: saves x, the weight and one number a row

B batch, T tokens, H value heads, K key dim, V value dim.
"""

from collections.abc import Callable

import torch
from torch.autograd import forward_ad

CHUNK = 64
"""Tokens of a chunk of the delta rule's kernel."""

_operations = torch.ops.longstraw_dry


def _define(schema: str, fake: Callable) -> None:
    name = f"longstraw_dry::{schema.partition('(')[0]}"
    torch.library.define(name, schema.removeprefix(schema.partition("(")[0]))
    torch.library.register_fake(name, fake)


_define(
    "delta_rule_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor state) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda q, k, v, g, beta, state: (
        torch.empty_like(v), torch.empty_like(g, dtype=torch.float32), k.new_empty(*k.shape[:3], CHUNK),
        torch.empty_like(state),
    ),
)
_define(
    "delta_rule_bwd(Tensor do, Tensor dend, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor inverses, Tensor state)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda do, dend, q, k, v, g, beta, inverses, state: tuple(map(torch.empty_like, (q, k, v, g, beta, state))),
)
_define(
    "l2norm_fwd(Tensor x) -> (Tensor, Tensor)",
    lambda x: (torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)),
)
_define("l2norm_bwd(Tensor dy, Tensor x, Tensor inverse) -> Tensor", lambda dy, x, inverse: torch.empty_like(x))
_define(
    "scan(Tensor best, Tensor q, Tensor weights, Tensor keys, int top_k) -> Tensor",
    lambda best, q, weights, keys, top_k: best.new_empty(best.shape[0], min(top_k, best.shape[1] + keys.shape[0])),
)
_define(
    "rms_norm_fwd(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    lambda x, weight, eps: (torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)),
)
_define(
    "rms_norm_bwd(Tensor dy, Tensor x, Tensor weight, Tensor inverse) -> (Tensor, Tensor)",
    lambda dy, x, weight, inverse: (torch.empty_like(x), torch.empty_like(weight)),
)


class _FusedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, state, hold):
        o, decays, inverses, end = _operations.delta_rule_fwd(q, k, v, g, beta, state)
        hold(fwd_workspace(k, v, state))
        ctx.save_for_backward(q, k, v, decays, beta, inverses, state)
        ctx.hold = hold
        return o, end

    @staticmethod
    def backward(ctx, do, dend):
        q, k, v, *_, state = ctx.saved_tensors
        grads = _operations.delta_rule_bwd(do, dend, *ctx.saved_tensors)
        ctx.hold(bwd_workspace(k, v, state))
        return *grads, None


def fwd_workspace(k: torch.Tensor, v: torch.Tensor, state: torch.Tensor) -> int:
    """Bytes that the forward needs beside its results: w, u and what each token writes, the states before the chunks, and
    the triangular systems in float32. k [B, T, H, K], v [B, T, H, V], state [B, H, K, V]."""
    return k.nbytes + 2 * v.nbytes + _chunk_states(k, state) + 4 * k[..., 0].numel() * CHUNK


def bwd_workspace(k: torch.Tensor, v: torch.Tensor, state: torch.Tensor) -> int:
    """Bytes that the backward needs beside its results: the forward's again, and their gradients."""
    return 3 * k.nbytes + 4 * v.nbytes + 2 * _chunk_states(k, state) + 4 * k[..., 0].numel() * CHUNK


def _chunk_states(k: torch.Tensor, state: torch.Tensor) -> int:
    return -(-k.shape[1] // CHUNK) * state.numel() * k.element_size()


def fused_delta_rule(hold: Callable[[int], None]):
    """Stands for flash-linear-attention's `chunk_gated_delta_rule`. hold: told of bytes that a kernel needs for a moment."""

    def chunk_gated_delta_rule(
        q, k, v, g, beta, initial_state, output_final_state=True, use_qk_l2norm_in_kernel=False, **_
    ):
        return _FusedDeltaRule.apply(q, k, v, g, beta, initial_state, hold)

    return chunk_gated_delta_rule


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y, inverse = _operations.l2norm_fwd(x)
        ctx.save_for_backward(x, inverse)
        return y

    @staticmethod
    def backward(ctx, dy):
        return _operations.l2norm_bwd(dy, *ctx.saved_tensors)


def fused_l2norm(x: torch.Tensor, dim: int = -1, eps: float = 1e-6) -> torch.Tensor:
    """Stands for flash-linear-attention's `l2norm` along the last dimension; in forward mode ordinary operations do."""
    if forward_ad.unpack_dual(x).tangent is not None:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).sum(dim, keepdim=True) + eps)).to(x.dtype)
    return _FusedNorm.apply(x)


class _FusedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        y, inverse = _operations.rms_norm_fwd(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return y

    @staticmethod
    def backward(ctx, dy):
        return *_operations.rms_norm_bwd(dy, *ctx.saved_tensors), None


_rms_norm = torch.nn.functional.rms_norm


def fused_rms_norm(input, normalized_shape, weight=None, eps=None):
    """Stands for `torch.nn.functional.rms_norm` over the last dimension; in forward mode it is torch's own."""
    if weight is None or forward_ad.unpack_dual(input).tangent is not None:
        return _rms_norm(input, normalized_shape, weight, eps)
    return _FusedRmsNorm.apply(input, weight, eps)
