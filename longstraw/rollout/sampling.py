"""Sample next tokens from logits: temperature, top-k, top-p, one uniform number a row.

B rows (responses decoded together), V vocabulary.

A token is drawn by inverting the cumulative distribution at a uniform number, taken in float64 over token ids in
ascending order. So a draw consumes exactly one number a row, whatever V and the truncation, and the same logits and
numbers give the same tokens on every rank. Ties are settled by token id: of equal logits the lower id counts as the
likelier one, in greedy choice and at the edge of top-k and top-p.

Two log-probabilities come back. `logprobs` belong to softmax(logits / temperature), the distribution that training
scores, untruncated; `sampling_logprobs` to the truncated and renormalised one the token was drawn from. They are
equal where nothing is truncated.

Left out: gathering logits over tensor-parallel ranks and cutting off vocabulary padding (the caller's), repetition
penalties, stop tokens.
"""

from dataclasses import dataclass

import torch

from longstraw.rollout.config import SamplingConfig


@dataclass(frozen=True)
class SampledTokens:
    """One token a row. All [B]."""

    token_ids: torch.Tensor
    """int64."""

    logprobs: torch.Tensor
    """Under softmax(logits / temperature), untruncated; under softmax(logits) when the temperature is 0."""

    sampling_logprobs: torch.Tensor
    """Under the distribution sampled from: after top-k and top-p, renormalised. 0 when the temperature is 0."""


def sample_tokens(logits: torch.Tensor, config: SamplingConfig, generator: torch.Generator) -> SampledTokens:
    """Sample a token for each row.

    Args:
        logits: [B, V] float32 or float64. -inf excludes a token.
        config: temperature, top-k and top-p.
        generator: gives one float64 number a row and call, greedy or not. It may live on the CPU while the logits
            do not: then every kind of device draws the same numbers.

    Raises:
        ValueError: logits of another shape or dtype, NaN or +inf among them, or a row of -inf only.
    """
    uniforms = torch.rand(logits.shape[0], dtype=torch.float64, device=generator.device, generator=generator)
    return sample_tokens_at(logits, config, uniforms.to(logits.device))


def sample_tokens_at(logits: torch.Tensor, config: SamplingConfig, uniforms: torch.Tensor) -> SampledTokens:
    """`sample_tokens` at given uniform numbers [B] in [0, 1), float64: a pure function."""
    if logits.dim() != 2 or logits.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"logits must be [B, V] in float32 or float64, got {list(logits.shape)} {logits.dtype}.")
    # The maximum is NaN if any logit is, +inf if any is, -inf if all are: finite means usable.
    row_max = logits.amax(-1, keepdim=True)
    if not bool(torch.isfinite(row_max).all()):
        raise ValueError("logits to sample from must hold neither NaN nor +inf, nor -inf throughout a row.")

    if config.sampling_temperature == 0.0:
        token_ids = logits.argmax(-1)
        logprobs = _gather(torch.log_softmax(logits, -1), token_ids)
        return SampledTokens(token_ids, logprobs, torch.zeros_like(logprobs))

    # Shifted first, so that no temperature, however small, overflows.
    scaled = (logits - row_max) / config.sampling_temperature
    kept = truncate(scaled, top_k=config.sampling_top_k, top_p=config.sampling_top_p)
    log_distribution = torch.log_softmax(scaled.double().masked_fill(~kept, -torch.inf), -1)
    cumulative = log_distribution.exp().cumsum(-1)
    # The first token whose cumulative probability exceeds the number: never one of probability 0.
    thresholds = uniforms[:, None] * cumulative[:, -1:]
    token_ids = torch.searchsorted(cumulative, thresholds, right=True)[:, 0]
    return SampledTokens(
        token_ids=token_ids,
        logprobs=_gather(torch.log_softmax(scaled, -1), token_ids),
        sampling_logprobs=_gather(log_distribution, token_ids).to(logits.dtype),
    )


def truncate(logits: torch.Tensor, *, top_k: int, top_p: float) -> torch.Tensor:
    """Which tokens may be sampled: first the top_k likeliest, then of those the smallest set whose share of their
    probability reaches top_p.

    Args:
        logits: [B, V], already divided by the temperature.
        top_k: 0 for no limit.
        top_p: in (0, 1]; 1 for no limit.

    Returns:
        bool [B, V], at least one token in each row.
    """
    kept = torch.isfinite(logits)
    if 0 < top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[:, -1:]
        above, level = logits > kth, logits == kth
        # Of the tokens level with the k-th, the lowest ids fill what is left of k.
        places = top_k - above.sum(-1, keepdim=True)
        kept = kept & (above | (level & (level.cumsum(-1) <= places)))
    if top_p < 1.0:
        # A stable descending sort leaves equal logits in the order of their ids.
        ordered, ids = logits.double().masked_fill(~kept, -torch.inf).sort(dim=-1, descending=True, stable=True)
        cumulative = torch.softmax(ordered, -1).cumsum(-1)
        before = torch.nn.functional.pad(cumulative[:, :-1], (1, 0))
        in_set = torch.zeros_like(kept).scatter_(1, ids, before < top_p)
        kept = kept & in_set
    return kept


def _gather(values: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    return values.gather(-1, token_ids[:, None])[:, 0]
