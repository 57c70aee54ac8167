"""The loss of each token: the clipped policy loss, at token or sequence level, and the KL term.

T tokens of a block of a response.

LongStraw replays a response block by block, so a block must know its loss without the other blocks. Every term here
is therefore a value with a known derivative by the token's own log-probability p_t = log pi(y_t):

    token level     loss_t = -min(r_t A, clip(r_t) A),   r_t = exp(p_t - old_t)
                    d loss_t / d p_t = loss_t where the clip is not active, else 0
    sequence level  loss_t = -min(s A, clip(s) A),       s = exp(mean over trained tokens of (p_t - old_t))
                    s depends on every token of the response: ds / dp_t = s / |y|. Summed over the |y| trained tokens,
                    which all have one weight w, sum_u w loss_u has the derivative |y| w * loss / |y| = w * loss by each
                    p_t. So again each token gets w * loss_t where the clip is not active, else 0, and blocks are exact
                    as long as s is known beforehand: the forward sweep gives it (`sequence_log_ratio`).

Both are the same code with another log-ratio. The derivative is attached to the value (`_attach_gradient`) rather
than left to autograd through exp, min and clamp: there an overflowed exp behind a clip or a mask gives 0 * inf = NaN.
A ratio that overflows where nothing clips it (a negative advantage and a far higher probability than before) is a
true infinity and is reported as one. NaN log-probabilities of trained tokens make the loss NaN.

KL estimators, with d = ref_t - p_t, for tokens sampled from the policy (Schulman, "Approximating KL Divergence"):

    k1 = -d             unbiased value; derivative 1: its expected gradient is 0, so as a loss it trains nothing
    k2 = d^2 / 2        biased value; derivative -d: the unbiased gradient of KL(pi || ref)
    k3 = e^d - 1 - d    unbiased, never negative; derivative 1 - e^d: the unbiased gradient of KL(ref || pi)

Left out: entropy bonus, a second clip for negative advantages. Corrections for a sampler that differs from the trained
policy are factors of these losses (`longstraw.objectives.mismatch`).
"""

import math
from dataclasses import dataclass, fields
from typing import Optional, Union

import torch
import torch.distributed as dist

from longstraw.objectives.config import ObjectiveConfig


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """A block's losses and what is worth watching. All [T]; masked tokens are 0 (False), and 1 in `ratio`."""

    loss: torch.Tensor
    """Unweighted loss of each token, policy and KL; the only one with a gradient."""

    ratio: torch.Tensor
    """Importance ratio before clipping: the token's, or the response's under sequence-level importance."""

    clipped: torch.Tensor
    """bool: the clip removed this token's policy gradient."""

    log_ratio: torch.Tensor
    """p_t - old_t of the token itself, at either importance level."""

    kl: torch.Tensor
    """KL estimate towards the reference, unweighted; 0 without reference log-probabilities."""

    nan_logprobs: torch.Tensor
    """int64 []: NaN log-probabilities in the block, masked tokens included (those reach no loss)."""


def token_policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: Union[float, torch.Tensor],
    *,
    config: ObjectiveConfig,
    loss_mask: Optional[torch.Tensor] = None,
    ref_logprobs: Optional[torch.Tensor] = None,
    sequence_log_ratio: Union[float, torch.Tensor, None] = None,
) -> TokenLoss:
    """Loss of each token of a block: -min(ratio A, clip(ratio) A) + kl_coefficient * KL.

    The block's part of the step's loss is `(weights * result.loss).sum()` with the weights of `compute_loss_weights`.

    Args:
        logprobs: [T] with gradient; float32 or float64.
        old_logprobs: [T] under the policy that sampled.
        advantages: the response's advantage, a number or []; [T] is taken under token-level importance.
        config: importance level, clip range, KL coefficient and estimator.
        loss_mask: [T], bool or 0/1; None trains every token.
        ref_logprobs: [T] under the reference policy; needed if kl_coefficient is not 0, else only reported.
        sequence_log_ratio: the whole response's, from `sequence_log_ratio`; needed under sequence-level importance
            and refused otherwise.

    Raises:
        ValueError: shapes differ, or an input that the config needs is missing.
    """
    _check_inputs(logprobs, old_logprobs, advantages, config, loss_mask, ref_logprobs, sequence_log_ratio)
    p = logprobs.detach()
    kept = torch.ones_like(p, dtype=torch.bool) if loss_mask is None else loss_mask != 0
    advantages = torch.as_tensor(advantages, dtype=p.dtype, device=p.device).detach()

    log_ratio = torch.where(kept, p - old_logprobs.detach().to(p.dtype), 0.0)
    if config.importance_level == "sequence":
        known = torch.as_tensor(sequence_log_ratio, dtype=p.dtype, device=p.device).detach()
        importance = torch.where(kept, known, 0.0)
    else:
        importance = log_ratio

    value, clipped = _clipped_policy_term(importance, advantages, config)
    slope = torch.where(clipped, 0.0, value)
    kl = torch.zeros_like(p)
    if ref_logprobs is not None:
        ref = torch.where(kept, ref_logprobs.detach().to(p.dtype), 0.0)
        kl, kl_slope = estimate_kl(torch.where(kept, p, 0.0), ref, config.kl_estimator)
        if config.kl_coefficient != 0.0:
            value = value + config.kl_coefficient * kl
            slope = slope + config.kl_coefficient * kl_slope

    # Under sequence-level importance the value comes from the forward sweep: a NaN of the replay must still show.
    value, slope = torch.where(p.isnan(), p, value), torch.where(p.isnan(), p, slope)
    loss = _AttachGradient.apply(logprobs, torch.where(kept, value, 0.0), torch.where(kept, slope, 0.0))
    return TokenLoss(
        loss=loss,
        ratio=importance.exp(),
        clipped=clipped,
        log_ratio=log_ratio,
        kl=kl,
        nan_logprobs=p.isnan().sum(),
    )


def sequence_log_ratio(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, loss_mask: Optional[torch.Tensor] = None
) -> torch.Tensor:
    """The mean log-ratio of a whole response's trained tokens, whose exponential is GSPO's ratio (arXiv 2507.18071).

    Args:
        logprobs: [T] of the whole response under the current weights, from the forward sweep, all ranks' tokens.
        old_logprobs: [T] under the policy that sampled.
        loss_mask: [T], bool or 0/1; None takes every token.

    Returns:
        [] without gradient; 0 if no token is trained.
    """
    kept = torch.ones_like(logprobs, dtype=torch.bool) if loss_mask is None else loss_mask != 0
    log_ratio = torch.where(kept, logprobs.detach() - old_logprobs.detach().to(logprobs.dtype), 0.0)
    return log_ratio.sum() / kept.sum().clamp(min=1)


def estimate_kl(
    logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's KL estimate and its derivative by the token's log-probability. See the module's text.

    Args:
        logprobs, ref_logprobs: [T].
        estimator: "k1", "k2" or "k3".

    Returns:
        (value, derivative), both [T] without gradient.
    """
    d = ref_logprobs.detach() - logprobs.detach()
    if estimator == "k1":
        return -d, torch.where(d.isnan(), d, torch.ones_like(d))
    if estimator == "k2":
        return d.square() / 2, -d
    if estimator == "k3":
        return d.expm1() - d, -d.expm1()
    raise ValueError(f"--kl-estimator must be k1, k2 or k3, got {estimator!r}.")


@dataclass(frozen=True, kw_only=True)
class LossStatistics:
    """Sums over trained tokens that add up over blocks, responses and ranks. Tensors [] on the block's device."""

    num_tokens: torch.Tensor
    clipped_sum: torch.Tensor
    ratio_sum: torch.Tensor
    ratio_max: torch.Tensor
    kl_sum: torch.Tensor
    old_kl_sum: torch.Tensor
    nan_logprobs: torch.Tensor

    def __add__(self, other: "LossStatistics") -> "LossStatistics":
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        sums["ratio_max"] = torch.maximum(self.ratio_max, other.ratio_max)
        return LossStatistics(**sums)

    def means(self) -> dict[str, float]:
        """Numbers to report: means over trained tokens, the largest ratio, the count of NaN log-probabilities.

        `kl` is the configured estimate towards the reference, `old_kl` the k3 estimate towards the policy that
        sampled: exactly 0 while the policy has not moved.
        """
        count = max(int(self.num_tokens), 1)
        return {
            "ratio_mean": float(self.ratio_sum) / count,
            "ratio_max": float(self.ratio_max),
            "clip_fraction": float(self.clipped_sum) / count,
            "kl": float(self.kl_sum) / count,
            "old_kl": float(self.old_kl_sum) / count,
            "nan_logprobs": int(self.nan_logprobs),
        }


def loss_statistics(token_loss: TokenLoss, loss_mask: Optional[torch.Tensor] = None) -> LossStatistics:
    """Sum up a block's `TokenLoss` over its trained tokens; loss_mask as given to `token_policy_loss`."""
    ratio = token_loss.ratio
    kept = torch.ones_like(ratio, dtype=torch.bool) if loss_mask is None else loss_mask != 0
    # KL(old || new) from tokens of the old policy: k3 of new - old.
    old_kl = token_loss.log_ratio.expm1() - token_loss.log_ratio
    kept_ratio = torch.where(kept, ratio, 0.0)
    return LossStatistics(
        num_tokens=kept.sum(),
        clipped_sum=token_loss.clipped.sum(),
        ratio_sum=kept_ratio.sum(),
        ratio_max=kept_ratio.max() if kept_ratio.numel() else kept_ratio.new_zeros(()),
        kl_sum=token_loss.kl.sum(),
        old_kl_sum=old_kl.sum(),
        nan_logprobs=token_loss.nan_logprobs,
    )


def all_reduce_loss_statistics(statistics: LossStatistics, group: Optional[dist.ProcessGroup]) -> LossStatistics:
    """Add up the statistics of all ranks that hold different tokens: the data-parallel group with context parallelism.
    None is one rank."""
    if group is None:
        return statistics
    names = [field.name for field in fields(statistics) if field.name != "ratio_max"]
    sums = torch.stack([getattr(statistics, name).double() for name in names])
    ratio_max = statistics.ratio_max.double()
    dist.all_reduce(sums, group=group)
    dist.all_reduce(ratio_max, op=dist.ReduceOp.MAX, group=group)
    return LossStatistics(ratio_max=ratio_max, **dict(zip(names, sums.unbind())))


class _AttachGradient(torch.autograd.Function):
    """Give `value` the derivative `slope` by `logprobs`."""

    @staticmethod
    def forward(ctx, logprobs: torch.Tensor, value: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(slope)
        return value.clone()

    @staticmethod
    def backward(ctx, grad_loss: torch.Tensor):
        (slope,) = ctx.saved_tensors
        return grad_loss * slope, None, None


def _clipped_policy_term(
    log_ratio: torch.Tensor, advantages: torch.Tensor, config: ObjectiveConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """-min(r A, clip(r) A) and where the clip is active, both [T].

    The minimum is the ratio capped above where A > 0 and below where A < 0. Capping the log-ratio keeps exp finite
    wherever the cap holds; where A is 0 both caps apply, so that no overflow meets the 0.
    """
    low = math.log1p(-config.clip_range_low) if config.clip_range_low < 1.0 else -math.inf
    high = math.log1p(config.clip_range_high)
    clipped = ((advantages > 0) & (log_ratio > high)) | ((advantages < 0) & (log_ratio < low))
    capped = torch.where(advantages < 0, log_ratio, log_ratio.clamp(max=high))
    capped = torch.where(advantages > 0, capped, capped.clamp(min=low))
    return -advantages * capped.exp(), clipped


def _check_inputs(logprobs, old_logprobs, advantages, config, loss_mask, ref_logprobs, sequence_log_ratio) -> None:
    if logprobs.dim() != 1 or logprobs.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"logprobs must be [T] in float32 or float64, got {list(logprobs.shape)} {logprobs.dtype}.")
    for name, tensor in (("old_logprobs", old_logprobs), ("ref_logprobs", ref_logprobs), ("loss_mask", loss_mask)):
        if tensor is not None and tensor.shape != logprobs.shape:
            raise ValueError(f"{name} must have the shape of logprobs, {list(logprobs.shape)}, got {list(tensor.shape)}.")
    per_token = isinstance(advantages, torch.Tensor) and advantages.dim() > 0
    if per_token and advantages.shape != logprobs.shape:
        raise ValueError(f"advantages must be a number or {list(logprobs.shape)}, got {list(advantages.shape)}.")
    if config.importance_level == "sequence":
        if sequence_log_ratio is None:
            raise ValueError("--importance-level sequence needs the whole response's sequence_log_ratio beforehand.")
        if per_token:
            raise ValueError("--importance-level sequence takes one advantage a response, not one a token.")
    elif sequence_log_ratio is not None:
        raise ValueError("sequence_log_ratio is read only with --importance-level sequence.")
    if config.kl_coefficient != 0.0 and ref_logprobs is None:
        raise ValueError(f"--kl-coefficient {config.kl_coefficient} needs ref_logprobs, the reference policy's.")
