"""Rewards of sampled groups: one batch of calls in processes of a replica's first rank, broadcast to its others.

So a slow or broken verifier is met once. What failed is counted until `forget_failures`. Left out: the processes
themselves (`megatron.grpo.reward_pool`), advantages.
"""

from collections import Counter
from collections.abc import Iterable

import torch.distributed as dist

from longstraw.transaction.group import PromptGroup
from megatron.grpo.prompts import Prompt
from megatron.grpo.reward_pool import RewardPool
from megatron.grpo.rewards import RewardConfig, RewardFailure, RewardResult, RewardSample, apply_failure_policy
from megatron.grpo.tokenizer import decode_response


class RewardScorer:
    """Scores groups on one model replica.

    replica: the group of this replica's ranks (tensor x context parallel); its first rank holds the reward pool.
    """

    def __init__(self, tokenizer, rewards: RewardConfig, *, stop_ids: frozenset[int], replica: dist.ProcessGroup):
        self.tokenizer, self.rewards, self.stop_ids, self.replica = tokenizer, rewards, stop_ids, replica
        self.statuses: Counter[str] = Counter()
        self.first_failure = ""  # how the first reward failed since `forget_failures`
        self.pool = RewardPool(rewards) if replica.rank() == 0 else None

    def close(self) -> None:
        """End the reward processes."""
        if self.pool is not None:
            self.pool.close()

    def score(self, prompts: list[Prompt], groups: list[PromptGroup]) -> None:
        """Fill in `rewards`, `scored`, `statuses`, `messages` and `kept` of groups, from one batch of reward calls.

        Raises RewardFailure, on every rank of the replica, under --reward-failure stop and where no worker could start.
        """
        shared: list[list[RewardResult] | str | None] = [None]
        if self.pool is not None:
            try:
                shared = [self.pool.score(self._reward_samples(prompts, groups))]
            except (RuntimeError, ValueError) as error:
                shared = [str(error)]
        dist.broadcast_object_list(shared, group_src=0, group=self.replica)
        if isinstance(shared[0], str):
            raise RewardFailure(shared[0])
        results = list(shared[0])
        self.note((result.status, result.message) for result in results)
        values, kept = apply_failure_policy(results, self.rewards.reward_failure)
        for group in groups:
            count = len(group.samples)
            group.rewards, values = values[:count], values[count:]
            group.statuses = [result.status for result in results[:count]]
            group.messages = [result.message for result in results[:count]]
            group.scored, results = [status == "ok" for status in group.statuses], results[count:]
            group.kept, kept = kept[:count], kept[count:]

    def note(self, outcomes: Iterable[tuple[str, str]]) -> None:
        """Count (status, message) pairs of rewards, and remember the first failure."""
        for status, message in outcomes:
            self.statuses[status] += 1
            if status != "ok" and not self.first_failure:
                self.first_failure = f"{status}: {message}"

    def forget_failures(self) -> None:
        """Start counting failed rewards anew."""
        self.statuses.clear()
        self.first_failure = ""

    def _reward_samples(self, prompts: list[Prompt], groups: list[PromptGroup]) -> list[RewardSample]:
        return [
            RewardSample(
                prompt=self.tokenizer.decode(prompt.token_ids),
                response=decode_response(self.tokenizer, [t for t in sample.token_ids if t not in self.stop_ids]),
                answer=prompt.answer, extra=prompt.extra,
            )
            for prompt, group in zip(prompts, groups)
            for sample in group.samples
        ]
