"""The gated delta rule, from a given recurrent state to the state it leaves.

S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T,  o_t = S_t^T q_t / sqrt(K)
(Gated Delta Networks, Yang et al. 2024, equations 9-10; the chunked form is its section 3.3).

`naive_delta_rule` walks token by token: the specification, and the faster form for a block of a few tokens.
`chunked_delta_rule` solves each chunk's triangular system at once; it gives what megatron-core's
`torch_chunk_gated_delta_rule` gives, several times faster on a CPU: only the state passes from chunk to chunk in a loop,
of two matrix products a step in either direction, and all else is done for all chunks together. Its backward is written
out, since autograd through that loop costs more than the arithmetic. With G the running sum of g inside a chunk,
D_ij = exp(G_i - G_j) for i >= j else 0, and per chunk n with start state S_n:

    (I + M) [U W] = [beta v, beta exp(G) k]     M = strictly lower part of (beta k k^T) * D
    X_n = U - W S_n                             what each token writes
    o_n = exp(G) q S_n + A X_n                  A = (q k^T) * D
    S_{n+1} = exp(G_C) S_n + (exp(G_C - G) k)^T X_n

B batch, T tokens, H value heads, K key dim, V value dim, C chunk, N chunks; in chunked tensors J = B x H.
"""

import math

import torch
from torch.autograd.function import once_differentiable

from longstraw.attention.dual import has_tangent


def naive_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    initial_state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k [B, T, H, K], v [B, T, H, V], log-decay g and write strength beta [B, T, H], initial_state [B, H, K, V].

    Returns the outputs [B, T, H, V] in v's dtype and the last state [B, H, K, V]; computed in float32 or wider.
    """
    dtype, (q, k, v, g, beta, state) = v.dtype, _widen(q, k, v, g, beta, initial_state)
    q = q * q.shape[-1] ** -0.5
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        delta = (v[:, t] - (state * k[:, t, :, :, None]).sum(-2)) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * delta[..., None, :]
        outputs.append((state * q[:, t, :, :, None]).sum(-2))
    return torch.stack(outputs, 1).to(dtype), state


def chunked_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    initial_state: torch.Tensor, chunk_size: int = 32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as `naive_delta_rule`, a chunk of tokens at a time; differentiable in every input, the state included."""
    dtype, (batch, tokens, heads) = v.dtype, v.shape[:3]
    chunk_size = min(chunk_size, tokens)
    q, k, v, g, beta, state = _widen(q, k, v, g, beta, initial_state)
    q, k, v = (_to_chunks(t, chunk_size) for t in (q * q.shape[-1] ** -0.5, k, v))
    g, beta = (_to_chunks(t[..., None], chunk_size) for t in (g, beta))
    inputs = (q, k, v, g.cumsum(-2), beta, state.flatten(0, 1))
    o, state = _walk_chunks(*inputs) if has_tangent(*inputs) else _ChunkedDeltaRule.apply(*inputs)
    return _from_chunks(o, batch, tokens).to(dtype), state.unflatten(0, (batch, heads))


def _walk_chunks(q, k, v, G, beta, state):
    """The forward of `_ChunkedDeltaRule` in operations that forward mode can follow."""
    M, A, _ = _couple_tokens(q, k, G, beta)
    decay, to_end, end = _decays(G)
    right = torch.cat([v * beta, k * (beta * decay)], -1)
    solved = torch.linalg.solve_triangular(M, right, upper=False, unitriangular=True)
    U, W = solved.split([v.shape[-1], k.shape[-1]], -1)
    return _pass_state(q, k, U, W, A, decay, to_end, end, state)


def _pass_state(q, k, U, W, A, decay, to_end, end, state):
    """The outputs of all chunks, and the state that passes from one to the next."""
    outputs = []
    for n in range(len(q)):
        X = U[n] - W[n] @ state
        outputs.append((q[n] * decay[n]) @ state + A[n] @ X)
        state = state * end[n] + (k[n] * to_end[n]).transpose(-1, -2) @ X
    return torch.stack(outputs), state


class _ChunkedDeltaRule(torch.autograd.Function):
    """q, k [N, J, C, K], v [N, J, C, V], running log-decay G and beta [N, J, C, 1], start state [J, K, V]."""

    @staticmethod
    def forward(ctx, q, k, v, G, beta, state):
        M, A, _ = _couple_tokens(q, k, G, beta)
        decay, to_end, end = _decays(G)
        right = torch.cat([v * beta, k * (beta * decay)], -1)
        solved = torch.linalg.solve_triangular(M, right, upper=False, unitriangular=True)
        U, W = solved.split([v.shape[-1], k.shape[-1]], -1)
        k_end = (k * to_end).transpose(-1, -2)
        states, X = state.new_empty(len(q) + 1, *state.shape), torch.empty_like(v)
        states[0] = state
        for n in range(len(q)):
            torch.baddbmm(U[n], W[n], states[n], alpha=-1, out=X[n])
            torch.baddbmm(states[n] * end[n], k_end[n], X[n], out=states[n + 1])
        o = (q * decay) @ states[:-1]
        o += A @ X
        ctx.save_for_backward(q, k, v, G, beta, solved, states, X)
        return o, states[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dstate):
        q, k, v, G, beta, solved, states, X = ctx.saved_tensors
        M, A, D = _couple_tokens(q, k, G, beta)
        U, W = solved.split([v.shape[-1], k.shape[-1]], -1)
        decay, to_end, end = _decays(G)
        k_end, Wt = k * to_end, W.transpose(-1, -2)
        # back over the chunks: dX, and dS, the gradient of the state that each chunk leaves
        dX = A.transpose(-1, -2) @ do
        from_outputs = (q * decay).transpose(-1, -2) @ do
        dS = torch.empty_like(states)
        dS[-1] = dstate
        for n in reversed(range(len(q))):
            dX[n].baddbmm_(k_end[n], dS[n + 1])
            torch.baddbmm(from_outputs[n].addcmul_(dS[n + 1], end[n]), Wt[n], dX[n], alpha=-1, out=dS[n])
        starts, dends = states[:-1], dS[1:]
        # through the triangular system
        dsolved = torch.cat([dX, -dX @ starts.transpose(-1, -2)], -1)
        dright = torch.linalg.solve_triangular(M.transpose(-1, -2), dsolved, upper=True, unitriangular=True)
        dM = -(dright @ solved.transpose(-1, -2)).tril_(-1)
        dA = do @ X.transpose(-1, -2)
        dright_v, dright_k = dright.split([v.shape[-1], k.shape[-1]], -1)
        # products of tokens, and what each decay touches
        dkk, dqk = dM * D, dA * D
        dq_decayed, dk_end = do @ starts.transpose(-1, -2), X @ dends.transpose(-1, -2)
        dk_beta = dkk @ k + dright_k * decay
        dq = dqk @ k + dq_decayed * decay
        dk = dqk.transpose(-1, -2) @ q + dkk.transpose(-1, -2) @ (k * beta) + dk_beta * beta + dk_end * to_end
        dbeta = (dk_beta * k).sum(-1, keepdim=True) + (dright_v * v).sum(-1, keepdim=True)
        pairs = dM.mul_(M).addcmul_(dA, A)
        at_end = (dk_end * k_end).sum(-1, keepdim=True)
        dG = pairs.sum(-1, keepdim=True) - pairs.sum(-2)[..., None] - at_end
        dG += ((dq_decayed * q + dright_k * (k * beta)) * decay).sum(-1, keepdim=True)
        dG[:, :, -1:] += at_end.sum(-2, keepdim=True) + (dends * starts).sum((-1, -2))[..., None, None] * end
        return dq, dk, dright_v * beta, dG, dbeta, dS[0]


def _couple_tokens(q, k, G, beta):
    """M, A and D of a chunk, each [N, J, C, C]; masked before exp, which would overflow above the diagonal."""
    above = torch.ones(k.shape[-2], k.shape[-2], dtype=torch.bool, device=k.device).triu(1)
    D = _exp_in_range((G - G.transpose(-1, -2)).masked_fill_(above, 0.0)).tril_()
    kt = k.transpose(-1, -2)
    M = ((k * beta) @ kt).mul_(D).tril_(-1)  # + identity, which unitriangular implies
    return M, (q @ kt).mul_(D), D


def _decays(G):
    """The decay from the chunk's start to each token, from each token to its end [N, J, C, 1], and over all of it."""
    end = G[:, :, -1:]
    return _exp_in_range(G.clone()), _exp_in_range(end - G), _exp_in_range(end.clone())


def _exp_in_range(x: torch.Tensor) -> torch.Tensor:
    """exp, in place; what would be below the dtype's smallest normal number is that number, since a CPU computes
    infinities, zeros and subnormal numbers many times slower than the rest."""
    return x.clamp_(min=math.log(torch.finfo(x.dtype).tiny)).exp_()


def _widen(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]


def _to_chunks(x: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """[B, T, H, X] -> [N, J, C, X]; zero tokens at the end change neither state nor outputs (beta 0, g 0)."""
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % chunk_size))
    return x.unflatten(1, (-1, chunk_size)).permute(1, 0, 3, 2, 4).flatten(1, 2)


def _from_chunks(x: torch.Tensor, batch: int, tokens: int) -> torch.Tensor:
    """[N, J, C, X] -> [B, T, H, X], without what `_to_chunks` added."""
    return x.unflatten(1, (batch, -1)).permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :tokens]
