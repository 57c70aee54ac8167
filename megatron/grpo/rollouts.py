"""Rollouts and rewards of a step: prompts in, groups with advantages out.

Every rank of a model replica (tensor x context parallel) samples the same responses. Rewards run in processes of the
replica's first rank and are broadcast to the others, so that a slow or broken verifier is met once.
"""

from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist

from longstraw.objectives.advantages import compute_advantages
from longstraw.objectives.config import ObjectiveConfig
from longstraw.rollout.config import SamplingConfig
from longstraw.rollout.resident import decode_group
from longstraw.transaction.group import PromptGroup
from longstraw.transaction.step import Step
from megatron.grpo.prompts import Prompt
from megatron.grpo.random_states import derive_seed
from megatron.grpo.reward_pool import RewardPool
from megatron.grpo.rewards import RewardConfig, RewardResult, RewardSample, apply_failure_policy, count_statuses
from megatron.grpo.tokenizer import decode_response


class Rollouts:
    """Samples and scores groups on one model replica.

    replica: the group of this replica's ranks (tensor x context parallel); its first rank holds the reward pool.
    """

    def __init__(
        self, step: Step, tokenizer, sampling: SamplingConfig, rewards: RewardConfig, *, stop_ids: frozenset[int],
        replica: dist.ProcessGroup, seed: int, device: torch.device,
    ):
        self.step, self.tokenizer, self.sampling, self.rewards = step, tokenizer, sampling, rewards
        self.stop_ids, self.replica, self.seed, self.device = stop_ids, replica, seed, device
        self.statuses: Counter[str] = Counter()
        self.first_failure = ""  # how the first reward failed since `forget_failures`
        self.pool = RewardPool(rewards) if replica.rank() == 0 else None

    def close(self) -> None:
        """End the reward processes."""
        if self.pool is not None:
            self.pool.close()

    def sample(self, prompt: Prompt, group_size: int, *draw: object, keep_state: bool, version: int) -> PromptGroup:
        """Capture a prompt and decode `group_size` responses; `draw` names the random numbers (step, attempt, ...)."""
        tokens = torch.tensor([prompt.token_ids], device=self.device)
        state = self.step.capture(tokens)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, prompt.prompt_id, *draw))
        samples = decode_group(
            self.step.engine, tokens, state, group_size=group_size, config=self.sampling, stop_ids=self.stop_ids,
            generator=generator, prompt_id=prompt.prompt_id, weight_version=version, num_tokens=len(self.tokenizer),
        )
        return PromptGroup(prompt.prompt_id, tokens, samples, state=state if keep_state else None)

    def score(self, prompts: list[Prompt], groups: list[PromptGroup]) -> None:
        """Fill in `rewards`, `scored` and `kept` of groups, from one batch of reward calls.

        Raises RewardFailure, on every rank of the replica, under --reward-failure stop.
        """
        shared: list[list[RewardResult] | BaseException | None] = [None]
        if self.pool is not None:
            try:
                shared = [self.pool.score(self._reward_samples(prompts, groups))]
            except (RuntimeError, ValueError) as error:
                shared = [error]
        dist.broadcast_object_list(shared, group_src=0, group=self.replica)
        if isinstance(shared[0], BaseException):
            raise shared[0]
        results = list(shared[0])
        self.statuses.update(count_statuses(results))
        failed = next((result for result in results if result.status != "ok"), None)
        if failed is not None and not self.first_failure:
            self.first_failure = f"{failed.status}: {failed.message}"
        values, kept = apply_failure_policy(results, self.rewards.reward_failure)
        for group in groups:
            count = len(group.samples)
            group.rewards, values = values[:count], values[count:]
            group.scored, results = [result.status == "ok" for result in results[:count]], results[count:]
            group.kept, kept = kept[:count], kept[count:]

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
