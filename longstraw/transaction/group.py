"""The responses of one prompt, and their segments: padded together, scored, and given their loss.

Responses of different lengths are replayed together by padding at the end: everything is causal, so padding changes
nothing before it, and its loss weight is 0.

P prompt tokens, T tokens of a response, B responses replayed together.
"""

from dataclasses import dataclass, field

import torch

from longstraw.objectives.config import ObjectiveConfig
from longstraw.objectives.losses import LossStatistics, loss_statistics, sequence_log_ratio, token_policy_loss
from longstraw.objectives.mismatch import MismatchStatistics, log_ratio
from longstraw.rollout.protocol import Sample
from longstraw.segments import Segment, SegmentState, response_segment


@dataclass(eq=False)
class PromptGroup:
    """One prompt [1, P] and its sampled responses.

    rewards, advantages: one a response. scored: whether it has a reward; statuses, messages: why not. kept: whether it takes
    part in the loss. old_logprobs, ref_logprobs: [T] each, once scored. state: the prompt's captured state while it is
    alive. draw: (attempt, place) of the prompt in the step, over all replicas. mismatch: of its trained responses, between
    sampler and trainer, once replayed.
    """

    prompt_id: str
    prompt: torch.Tensor
    samples: list[Sample]
    rewards: list[float] = field(default_factory=list)
    scored: list[bool] = field(default_factory=list)
    statuses: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    old_logprobs: list[torch.Tensor] | None = None
    ref_logprobs: list[torch.Tensor] | None = None
    state: SegmentState | None = None
    draw: tuple[int, int] = (0, 0)
    mismatch: MismatchStatistics | None = None

    def loss_masks(self) -> list[torch.Tensor]:
        """One [T] bool mask a response: all of its tokens, or none where it is left out."""
        return [torch.full((len(s.token_ids),), kept) for s, kept in zip(self.samples, self.kept)]


def make_batches(
    group: PromptGroup, responses_together: int, *, routed: bool = False
) -> list[tuple[list[int], Segment]]:
    """The group's responses as segments of at most `responses_together` each -> [(indices, segment), ...].

    routed: rows go to the experts that the sampler sent them to.
    """
    batches = []
    for at in range(0, len(group.samples), responses_together):
        indices = list(range(at, min(at + responses_together, len(group.samples))))
        rows = [torch.tensor(group.samples[i].token_ids, device=group.prompt.device) for i in indices]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        segment = response_segment(f"response{at}", group.prompt, padded)
        segment.routes = _pad_routes([group.samples[i] for i in indices]) if routed else None
        batches.append((indices, segment))
    return batches


def _pad_routes(samples: list[Sample]) -> dict[int, torch.Tensor]:
    """Layer number -> experts [B, S, K]; padding, whose output nobody reads, goes to the first K."""
    rows = [sample.routes.to_tensor() for sample in samples]
    longest = max(len(row) for row in rows)
    filling = torch.arange(rows[0].shape[2]).expand(longest, *rows[0].shape[1:])
    padded = torch.stack([torch.cat([row, filling[len(row) :]]) for row in rows])
    return {number: padded[:, :, place] for place, number in enumerate(samples[0].routes.layers)}


def split_logprobs(group: PromptGroup, indices: list[int], logprobs: torch.Tensor) -> list[torch.Tensor]:
    """Log-probabilities of a batch [B, S] -> those of each response [T], without the padding."""
    return [logprobs[row, : len(group.samples[i].token_ids)] for row, i in enumerate(indices)]


def rollout_log_ratio(group: PromptGroup, index: int, logprobs: torch.Tensor) -> torch.Tensor:
    """Trainer minus sampler [T] float64, of one response. logprobs: the trainer's [T], at the weights that sampled."""
    sampled = torch.tensor(group.samples[index].logprobs, dtype=torch.float64, device=logprobs.device)
    return log_ratio(logprobs, sampled)


class GroupLoss:
    """The loss of a batch of responses, block by block, and its running statistics.

    weights: for each of the group's responses its [T] weights of the whole step (`compute_loss_weights`); padding has
    none. old, current: [T] of each response of the batch, when it was sampled and under the present weights; sequence-level
    importance needs `current`. factors: what each token's loss is multiplied with, [T] of each response of the batch.
    """

    def __init__(
        self, group: PromptGroup, indices: list[int], weights: list[torch.Tensor], config: ObjectiveConfig, width: int, *,
        old: list[torch.Tensor], current: list[torch.Tensor] | None = None, factors: list[torch.Tensor] | None = None,
    ):
        self._group, self._indices, self._config = group, indices, config
        self.statistics: LossStatistics | None = None
        self._weights = self._pad([weights[i] for i in indices], width)
        self._old = self._pad(old, width)
        self._factors = None if factors is None else self._pad(factors, width)
        refs = group.ref_logprobs
        self._ref = None if refs is None else self._pad([refs[i] for i in indices], width)
        self._sequence_log_ratios = None
        if config.importance_level == "sequence":
            masks = [weights[i].to(group.prompt.device) != 0 for i in indices]
            self._sequence_log_ratios = [sequence_log_ratio(*three) for three in zip(current, old, masks)]

    def _pad(self, rows: list[torch.Tensor], width: int) -> torch.Tensor:
        device = self._group.prompt.device
        return torch.stack([torch.nn.functional.pad(row.to(device), (0, width - row.shape[0])) for row in rows])

    def __call__(self, logprobs: torch.Tensor, columns: slice) -> torch.Tensor:
        """Sum of weighted token losses of a block (`longstraw.segments.BlockLoss`)."""
        total = logprobs.new_zeros(())
        for row, index in enumerate(self._indices):
            weight = self._weights[row, columns].to(logprobs.dtype)
            mask = weight != 0
            ratios = self._sequence_log_ratios
            losses = token_policy_loss(
                logprobs[row], self._old[row, columns], self._group.advantages[index], config=self._config,
                loss_mask=mask, ref_logprobs=None if self._ref is None else self._ref[row, columns],
                sequence_log_ratio=None if ratios is None else ratios[row],
            )
            if self._factors is not None:
                weight = weight * self._factors[row, columns].to(weight.dtype)
            total = total + (weight * losses.loss).sum()
            statistics = loss_statistics(losses, mask)
            self.statistics = statistics if self.statistics is None else self.statistics + statistics
        return total
