"""The gated delta rule, from a given recurrent state to the state it leaves.

S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T,  o_t = S_t^T q_t / sqrt(K)
(Gated Delta Networks, Yang et al. 2024, equations 9-10; the chunked form is its section 3.3).

`naive_delta_rule` walks token by token: the specification, and the faster form for a block of a few tokens.
`chunked_delta_rule` solves each chunk's triangular system at once; it gives what megatron-core's
`torch_chunk_gated_delta_rule` gives, several times faster on a CPU, since it has no loop over the rows of a chunk.

B batch, T tokens, H value heads, K key dim, V value dim, C chunk, N chunks.
"""

import torch


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
    dtype, tokens = v.dtype, v.shape[1]
    q, k, v, g, beta, state = _widen(q, k, v, g, beta, initial_state)
    q, k, v = (_to_chunks(t, chunk_size) for t in (q * q.shape[-1] ** -0.5, k, v))  # [B, H, N, C, .]
    g, beta = (_to_chunks(t[..., None], chunk_size)[..., 0] for t in (g, beta))
    g = g.cumsum(-1)
    # exp of the log-decay between two tokens, 0 above the diagonal; masked before exp, where it would overflow
    lower = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device).tril()
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    k_beta = k * beta[..., None]
    system = ((k_beta @ k.transpose(-1, -2)) * decay).tril(-1)  # + identity, which unitriangular implies
    right = torch.cat([v * beta[..., None], k_beta * g.exp()[..., None]], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, keys = solved.split([v.shape[-1], k.shape[-1]], -1)
    within = (q @ k.transpose(-1, -2)) * decay
    q_decayed = q * g.exp()[..., None]
    k_decayed = (k * (g[..., -1:] - g).exp()[..., None]).transpose(-1, -2)
    end_decay = g[..., -1].exp()[..., None, None]
    outputs = []
    for n in range(q.shape[2]):
        new = values[:, :, n] - keys[:, :, n] @ state
        outputs.append(q_decayed[:, :, n] @ state + within[:, :, n] @ new)
        state = state * end_decay[:, :, n] + k_decayed[:, :, n] @ new
    return torch.cat(outputs, 2)[:, :, :tokens].transpose(1, 2).to(dtype), state


def _widen(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]


def _to_chunks(x: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """[B, T, H, X] -> [B, H, N, C, X]; zero tokens at the end change neither state nor outputs (beta 0, g 0)."""
    x = torch.nn.functional.pad(x.transpose(1, 2), (0, 0, 0, -x.shape[1] % chunk_size))
    return x.unflatten(2, (-1, chunk_size))
