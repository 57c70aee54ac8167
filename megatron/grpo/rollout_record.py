"""What a run's receipt says of its rollouts: source, sampling and rewards, and its figures over the steps.

A step's metrics have its own figures (`rollout_log_ratio_mean` and so on); steps weigh alike in a receipt's means.
"""

from collections.abc import Mapping, Sequence

from megatron.grpo.receipt_settings import describe_responses
from megatron.grpo.rollouts import RolloutSource
from megatron.grpo.run_config import TrainConfig


def describe_rollouts(config: TrainConfig, source: RolloutSource, records: Sequence[Mapping], first_step: int) -> dict:
    """`Receipt.rollout`. records: the metrics of every step so far; those from `first_step` on are this process's."""
    own = [record for record in records if record["step"] >= first_step and "rollout_kl" in record]
    folder = config.rollouts.rollouts_from or config.rollouts.rollout_store
    found = {"source": source.name, "sampled_by": source.sampled_by, "store": folder} | describe_responses(config)
    if own:
        found |= {
            "log_ratio_mean": sum(record["rollout_log_ratio_mean"] for record in own) / len(own),
            "log_ratio_max": max(record["rollout_log_ratio_max"] for record in own),
            "kl": sum(record["rollout_kl"] for record in own) / len(own),
        }
    return found
