"""The weight of every token's loss, known before the first backward.

LongStraw replays responses one at a time and block by block, so a step's loss must be a sum

    L = sum over responses i and tokens t of w_it * loss_it

whose weights do not depend on what is replayed together. The weights divide once, by the counts of the whole step:
all responses of all groups on all data-parallel ranks. Micro-batches, blocks, data parallelism, context parallelism
and padding then change neither the loss nor a gradient. (Megatron must not divide again: run it with
`calculate_per_token_loss`, so that gradients are summed over ranks.)

Tokens masked out leave the numerator and the denominator. A response without a trained token, for instance a
truncated one that is masked whole, is no response in any count.

T tokens of a response.

Left out: cutting a response's weights to a block or a rank, which is plain slicing.
"""

from dataclasses import dataclass
from typing import Optional, Sequence

import torch
import torch.distributed as dist

from longstraw.objectives.config import ObjectiveConfig


@dataclass(frozen=True, kw_only=True)
class LossCounts:
    """What the loss of a step is divided by. Counts of several ranks or groups add up."""

    num_tokens: int
    """Trained tokens: those that a loss mask keeps."""

    num_sequences: int
    """Responses with at least one trained token."""

    def __add__(self, other: "LossCounts") -> "LossCounts":
        return LossCounts(
            num_tokens=self.num_tokens + other.num_tokens, num_sequences=self.num_sequences + other.num_sequences
        )


def count_loss_terms(loss_masks: Sequence[torch.Tensor]) -> LossCounts:
    """Count the trained tokens and responses of some responses.

    Args:
        loss_masks: for each response its whole mask [T], bool or 0/1, before any cut over context-parallel ranks.

    Raises:
        ValueError: a mask is not [T] or holds something else than 0 and 1.
    """
    lengths = [int(_as_bool(mask).sum()) for mask in loss_masks]
    return LossCounts(num_tokens=sum(lengths), num_sequences=sum(length > 0 for length in lengths))


def all_reduce_loss_counts(
    counts: LossCounts, group: Optional[dist.ProcessGroup], *, device: torch.device | str = "cpu"
) -> LossCounts:
    """Sum the counts over the ranks that hold different responses.

    Args:
        counts: this rank's.
        group: the data-parallel group *without* context parallelism, whose ranks share a response; None for one rank.
        device: where the group's backend wants its tensors ("cuda" for NCCL).
    """
    if group is None:
        return counts
    pair = torch.tensor([counts.num_tokens, counts.num_sequences], dtype=torch.int64, device=device)
    dist.all_reduce(pair, group=group)
    num_tokens, num_sequences = pair.tolist()
    return LossCounts(num_tokens=num_tokens, num_sequences=num_sequences)


def compute_loss_weights(
    loss_masks: Sequence[torch.Tensor],
    config: ObjectiveConfig,
    *,
    counts: LossCounts,
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """The weight w_it of each token's loss, by `config.loss_aggregation`.

        token           1 / num_tokens
        sequence        1 / (trained tokens of the response * num_sequences)
        group_constant  1 / (loss_constant * num_sequences)

    on trained tokens and 0 elsewhere. Within a response all trained tokens weigh the same, which
    `token_policy_loss` relies on for sequence-level importance.

    Args:
        loss_masks: for each response of this rank its whole mask [T], bool or 0/1.
        config: names the aggregation and its constant.
        counts: of the whole step, all ranks: `all_reduce_loss_counts(count_loss_terms(loss_masks), dp_group)`.
        dtype: of the weights; take the log-probabilities'.

    Returns:
        For each response its weights [T], on its mask's device.

    Raises:
        ValueError: the whole step has no trained token, or `counts` is less than these masks hold.
    """
    if counts.num_tokens == 0:
        raise ValueError("No token of this step is trained: every response's loss mask is empty.")
    local = count_loss_terms(loss_masks)
    if local.num_tokens > counts.num_tokens or local.num_sequences > counts.num_sequences:
        raise ValueError(f"The step's counts {counts} are less than this rank's own, {local}.")

    weights = []
    for mask in loss_masks:
        mask = _as_bool(mask)
        length = int(mask.sum())
        if config.loss_aggregation == "token":
            divisor = counts.num_tokens
        elif config.loss_aggregation == "sequence":
            divisor = max(length, 1) * counts.num_sequences
        else:
            divisor = config.loss_constant * counts.num_sequences
        weights.append(mask.to(dtype) * (1.0 / divisor))
    return weights


def _as_bool(mask: torch.Tensor) -> torch.Tensor:
    if mask.dim() != 1:
        raise ValueError(f"A loss mask must be [T], got {list(mask.shape)}.")
    if mask.dtype == torch.bool:
        return mask
    kept = mask != 0
    if not bool((mask == kept.to(mask.dtype)).all()):
        raise ValueError("A loss mask must hold 0 and 1 only: weights belong to the objective.")
    return kept
