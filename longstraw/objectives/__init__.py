"""Objectives: advantages, policy losses with weights known before backward, and chunked log-probabilities.

Pure functions over tensors. Nothing here knows Megatron, sweeps or prompt state.
"""

from longstraw.objectives.advantages import (
    RewardBaseline,
    UniformGroupsError,
    collect_groups,
    compute_advantages,
    group_advantages,
    is_uniform,
    keeps_group,
    leave_one_out_advantages,
)
from longstraw.objectives.config import ObjectiveConfig
from longstraw.objectives.logprobs import compute_logprobs, naive_logprobs
from longstraw.objectives.loss_weights import (
    LossCounts,
    all_reduce_loss_counts,
    compute_loss_weights,
    count_loss_terms,
)
from longstraw.objectives.losses import (
    LossStatistics,
    TokenLoss,
    all_reduce_loss_statistics,
    estimate_kl,
    loss_statistics,
    sequence_log_ratio,
    token_policy_loss,
)
from longstraw.objectives.mismatch import (
    MismatchConfig,
    MismatchStatistics,
    all_reduce_mismatch,
    exceeds_bound,
    importance_weights,
    log_ratio,
    mismatch_statistics,
)
from longstraw.objectives.presets import RECIPES

__all__ = [
    "LossCounts",
    "LossStatistics",
    "MismatchConfig",
    "MismatchStatistics",
    "ObjectiveConfig",
    "RECIPES",
    "RewardBaseline",
    "TokenLoss",
    "UniformGroupsError",
    "all_reduce_loss_counts",
    "all_reduce_loss_statistics",
    "all_reduce_mismatch",
    "collect_groups",
    "compute_advantages",
    "compute_logprobs",
    "compute_loss_weights",
    "count_loss_terms",
    "estimate_kl",
    "exceeds_bound",
    "group_advantages",
    "importance_weights",
    "is_uniform",
    "keeps_group",
    "leave_one_out_advantages",
    "log_ratio",
    "loss_statistics",
    "mismatch_statistics",
    "naive_logprobs",
    "sequence_log_ratio",
    "token_policy_loss",
]
