"""One step's scored groups, from wherever they come: the interface that the trainer asks, and groups that are sampled now.

`SampledRollouts` takes prompts in their order, has a `Sampler` answer and a `RewardScorer` score them, filters whole groups,
and leaves the step in a store where one is given. `megatron.grpo.stored_rollouts` has the groups of an earlier run.

Ranks agree on every failure before the next collective, so that none waits for one that has given up.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from longstraw.objectives.advantages import collect_groups, compute_advantages
from longstraw.objectives.config import ObjectiveConfig
from longstraw.transaction.commit import StepRejected, agree_on_failure
from longstraw.transaction.group import PromptGroup
from megatron.grpo.prompt_order import PromptOrder
from megatron.grpo.prompts import Prompt
from megatron.grpo.reward_scoring import RewardScorer
from megatron.grpo.rewards import RewardFailure
from megatron.grpo.samplers import Sampler, SamplingFailure


class RolloutSource(Protocol):
    """Where a step's groups come from."""

    name: str
    """resident, vllm or store: for receipts."""
    sampled_by: str
    """Who sampled: where groups come from a store, the source of the last step's."""

    def collect(self, number: int) -> list[PromptGroup]:
        """This replica's groups of step `number`, scored and filtered, without advantages; the order of the prompts then
        stands behind the step.

        Called by every rank of the world. Raises StepRejected on all of them, or SamplingFailure on the ranks of a replica,
        which the caller makes known to the others; UniformGroupsError where the group filter leaves no replica a group.
        """


class StepWriter(Protocol):
    """Takes every step that has been sampled."""

    def write(self, number: int, groups: list[PromptGroup], left_out: list[PromptGroup], before: dict, after: dict) -> str:
        """Keep this replica's groups, with the data's position before and after the step; a sentence where that fails."""


class SampledRollouts:
    """Groups that are sampled and scored when they are asked for.

    dp: data-parallel group. world: all ranks, which agree on failures. store: takes each step before it is trained on.
    """

    def __init__(
        self, sampler: Sampler, scorer: RewardScorer, *, prompts, order: PromptOrder, objective: ObjectiveConfig,
        prompts_per_step: int, dp: dist.ProcessGroup, world: dist.ProcessGroup, device: torch.device,
        store: StepWriter | None = None,
    ):
        self.name = self.sampled_by = sampler.name
        self.sampler, self.scorer, self.prompts, self.order, self.objective = sampler, scorer, prompts, order, objective
        self.prompts_per_step, self.dp, self.world, self.device, self.store = prompts_per_step, dp, world, device, store

    def collect(self, number: int) -> list[PromptGroup]:
        """See `RolloutSource`."""
        self._agree(self.sampler.prepare(number))
        before, sampled = self.order.state_dict(), []
        share = self._take_prompts(self.prompts_per_step)

        def sample(missing: int, attempt: int) -> list[PromptGroup]:
            found = self._sample(share if attempt == 0 else self._take_more_prompts(missing), number, attempt, len(share))
            sampled.extend(found)
            return found

        groups = collect_groups(
            sample, lambda group: [r for r, kept in zip(group.rewards, group.kept) if kept] or [0.0], len(share),
            self.objective, sum_over_dp=sum_over(self.dp, self.device),
        )
        if self.store is not None:
            left_out = [group for group in sampled if not any(group is kept for kept in groups)]
            self._agree(self.store.write(number, groups, left_out, before, self.order.state_dict()))
        return groups

    def _sample(self, prompts: list[Prompt], number: int, attempt: int, share: int) -> list[PromptGroup]:
        # the place tells one prompt from the same one again, at an epoch's end
        places = [self.dp.rank() + self.dp.size() * place for place in range(len(prompts))]
        alone, failure, found = share == 1 and self.objective.group_filter == "none", "", []
        try:
            found = self.sampler.sample(prompts, step=number, attempt=attempt, places=places, alone=alone)
        except SamplingFailure as error:
            failure = str(error)
        self.sampler.finish()
        self._agree(failure)
        for group, place in zip(found, places):
            group.draw = attempt, place
        try:
            if found:
                self.scorer.score(prompts, found)
        except RewardFailure as error:
            failure = str(error)
        self._agree(failure)
        return found

    def _agree(self, failure: str) -> None:
        message = agree_on_failure(failure, self.world)
        if message:
            raise StepRejected(message)

    def _take_prompts(self, count: int) -> list[Prompt]:
        """This replica's share of the next `count` prompts of the whole job."""
        indices = self.order.take_shard(count, dp_rank=self.dp.rank(), dp_size=self.dp.size()) if count else []
        return [self.prompts[index] for index in indices]

    def _take_more_prompts(self, missing: int) -> list[Prompt]:
        """`missing` further prompts for this replica. Every replica moves on by as many as the neediest, so that all stand
        at the same place of the data. Collective over data parallel."""
        most = torch.tensor(missing, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.dp)
        return self._take_prompts(int(most) * self.dp.size())[:missing]


def set_advantages(
    group: PromptGroup, objective: ObjectiveConfig, *, mask_truncated: bool, baseline: float = 0.0
) -> None:
    """Advantages of the responses that take part; the others, and truncated ones where asked, leave the loss.

    A truncated response still counts in its group's statistics: its reward is known. Fewer than two comparable
    responses have no advantage, and the group leaves the loss; under running_mean each is compared with `baseline`.
    """
    scored = [i for i, kept in enumerate(group.kept) if kept]
    group.advantages = [0.0] * len(group.samples)
    if len(scored) < (1 if objective.advantage_estimator == "running_mean" else 2):
        group.kept = [False] * len(group.samples)
        return
    values = compute_advantages([group.rewards[i] for i in scored], objective, baseline=baseline).tolist()
    for index, value in zip(scored, values):
        group.advantages[index] = value
    if mask_truncated:
        group.kept = [
            kept and sample.finish_reason != "length" for kept, sample in zip(group.kept, group.samples)
        ]


def sum_over(group: dist.ProcessGroup, device: torch.device) -> Callable[[int], int]:
    """A function that sums an int over a process group."""

    def add(count: int) -> int:
        total = torch.tensor(count, device=device)
        dist.all_reduce(total, group=group)
        return int(total)

    return add
