"""Where the sampler and the trainer disagree about the same tokens at the same weights: how much, and what to do about it.

T tokens of a response, all of them trained. For each token, with both log-probabilities at the sampling temperature,

    d_t = log pi_trainer(y_t) - log pi_rollout(y_t)

Kernels, precisions and batch shapes make d differ from 0, and so does sampling from a truncated distribution (top-k, top-p):
the sampler's log-probability is of what it drew from. The gradient is then that of other samples than it takes them for.
Truncated importance sampling weighs the loss by what corrects that, up to a bound:

    token       w_t = min(exp(d_t), cap)              each token's loss by its own weight
    sequence    w   = min(exp(sum over T of d_t), cap)    all of a response's tokens by one

(Espeholt et al. 2018, arXiv 1802.01561, has the truncation.) The weights are constants: no gradient goes through them, and
neither ratio nor clip knows of them. Policy loss and KL term are both means over the trainer's own samples, so both are
weighed. What the loss is divided by does not change. A response can also be left out whole, where the mean of |d_t| is above
a bound: then it leaves the divisor too.

The KL of a step, KL(rollout || trainer), is estimated from the sampled tokens: k3 = exp(d) - 1 - d, never negative, and
k1 = -d, which may be. Both are unbiased where the sampler drew from the whole vocabulary.

Left out: bounds from below, and corrections for weights that have moved since (there is one update a batch).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal, Optional

import torch
import torch.distributed as dist

LARGEST_EXPONENT = 500.0
"""Of a token's k3: a sum over any number of tokens stays finite."""


@dataclass(frozen=True, kw_only=True)
class MismatchConfig:
    """Rollout-trainer mismatch: importance weights and masks."""

    rollout_is: Literal["none", "token", "sequence"] = "none"
    """Weigh the loss by how likely the trainer finds what was sampled, over how likely the sampler found it, at equal weights
    and up to --rollout-is-cap: each `token` by its own ratio, each `sequence` by the product of its tokens', or not at all."""

    rollout_is_cap: float = 2.0
    """Largest importance weight of --rollout-is."""

    rollout_mask_above: Optional[float] = None
    """Leave responses out of the loss, and of what it is divided by, whose tokens' log-probabilities differ between sampler
    and trainer by more than this on average, in nats. Costs a pass over the responses, and where a step has several prompts
    another over these."""

    def __post_init__(self) -> None:
        """Refuse values out of range.

        Raises:
            ValueError: in one sentence that names the flag.
        """
        if self.rollout_is not in ("none", "token", "sequence"):
            raise ValueError(f"--rollout-is must be none, token or sequence, not {self.rollout_is!r}")
        if not (math.isfinite(self.rollout_is_cap) and self.rollout_is_cap > 0.0):
            raise ValueError(f"--rollout-is-cap must be finite and above 0, not {self.rollout_is_cap}")
        bound = self.rollout_mask_above
        if bound is not None and not (math.isfinite(bound) and bound > 0.0):
            raise ValueError(f"--rollout-mask-above must be finite and above 0, not {bound}")


def log_ratio(trainer: torch.Tensor, rollout: torch.Tensor) -> torch.Tensor:
    """d [T] float64, without gradient.

    Raises ValueError where the two are not of the same tokens.
    """
    if trainer.dim() != 1 or trainer.shape != rollout.shape:
        raise ValueError(f"the trainer scores {list(trainer.shape)} tokens and the sampler {list(rollout.shape)}.")
    return trainer.detach().double() - rollout.detach().double()


def importance_weights(ratio: torch.Tensor, config: MismatchConfig) -> torch.Tensor | None:
    """The weight of each token's loss, [T] float64 in [0, cap]; None under `none`. ratio: d [T]."""
    if config.rollout_is == "none":
        return None
    # capped before exp, which would overflow, and after, where it rounds upwards
    return _exponent(ratio, config).clamp(max=math.log(config.rollout_is_cap)).exp().clamp(max=config.rollout_is_cap)


def _exponent(ratio: torch.Tensor, config: MismatchConfig) -> torch.Tensor:
    return ratio.sum().expand_as(ratio) if config.rollout_is == "sequence" else ratio


def exceeds_bound(ratio: torch.Tensor, config: MismatchConfig) -> bool:
    """Whether a response is to be left out. ratio: d [T]; one with a NaN stays, and makes the loss NaN."""
    return config.rollout_mask_above is not None and bool(ratio.abs().mean() > config.rollout_mask_above)


@dataclass(frozen=True, kw_only=True)
class MismatchStatistics:
    """Sums over trained tokens that add up over responses and replicas. Tensors [] float64 on the responses' device."""

    num_tokens: torch.Tensor
    log_ratio_sum: torch.Tensor
    log_ratio_max: torch.Tensor
    """The largest |d|."""
    kl_sum: torch.Tensor
    """Of k3."""
    weight_sum: torch.Tensor
    """Of the importance weights; of ones under `none`."""
    capped: torch.Tensor
    """Tokens whose weight the cap holds down."""

    def __add__(self, other: "MismatchStatistics") -> "MismatchStatistics":
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        sums["log_ratio_max"] = torch.maximum(self.log_ratio_max, other.log_ratio_max)
        return MismatchStatistics(**sums)

    @classmethod
    def zero(cls, device: torch.device) -> "MismatchStatistics":
        """Of no token."""
        return cls(**{field.name: torch.zeros((), dtype=torch.float64, device=device) for field in fields(cls)})

    def estimate_kl(self) -> float | None:
        """KL(rollout || trainer) in nats a token, by k1; None without tokens."""
        return -(self.log_ratio_sum / self.num_tokens).item() if self.num_tokens else None

    def means(self, config: MismatchConfig) -> dict[str, float]:
        """Numbers to report, by the names of the metrics; none without tokens."""
        if not self.num_tokens:
            return {}
        count = self.num_tokens
        found = {
            "rollout_log_ratio_mean": self.log_ratio_sum / count, "rollout_log_ratio_max": self.log_ratio_max,
            "rollout_kl": self.kl_sum / count,
        }
        if config.rollout_is != "none":
            found |= {"rollout_is_mean": self.weight_sum / count, "rollout_is_capped": self.capped / count}
        return {name: value.item() for name, value in found.items()}


def mismatch_statistics(ratio: torch.Tensor, config: MismatchConfig) -> MismatchStatistics:
    """Sum up one response. ratio: d [T]."""
    exponent, zero = ratio.clamp(max=LARGEST_EXPONENT), ratio.new_zeros(())
    count, weights = ratio.new_tensor(float(ratio.numel())), importance_weights(ratio, config)
    above = _exponent(ratio, config) > math.log(config.rollout_is_cap)
    return MismatchStatistics(
        num_tokens=count, log_ratio_sum=ratio.sum(), log_ratio_max=ratio.abs().max() if ratio.numel() else zero,
        kl_sum=(exponent.expm1() - exponent).sum(), weight_sum=count if weights is None else weights.sum(),
        capped=zero if weights is None else above.sum().double(),
    )


def all_reduce_mismatch(
    found: Iterable[MismatchStatistics], group: Optional[dist.ProcessGroup], *, device: torch.device
) -> MismatchStatistics:
    """Add up the statistics of this replica's groups and of all replicas: the data-parallel group *without* context
    parallelism, whose ranks share a response. None is one rank. Collective."""
    total = sum(found, MismatchStatistics.zero(device))
    if group is None:
        return total
    names = [field.name for field in fields(total) if field.name != "log_ratio_max"]
    sums, largest = torch.stack([getattr(total, name) for name in names]), total.log_ratio_max.clone()
    dist.all_reduce(sums, group=group)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return MismatchStatistics(log_ratio_max=largest, **dict(zip(names, sums.unbind())))
