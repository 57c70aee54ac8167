"""Mean reward on held-out prompts: one response each, sampled as in training, with random numbers of its own.

The prompts and their random numbers are the same at every evaluation, so that two evaluations differ by the weights
alone. Prompts are shared out over data-parallel replicas.

A reward that fails is treated as in training: it counts 0, is left out of the mean, or ends the run (--reward-failure).
"""

import math

import torch
import torch.distributed as dist

from longstraw.transaction.commit import StepRejected, agree_on_failure
from megatron.grpo.prompts import Prompt
from megatron.grpo.reward_scoring import RewardScorer
from megatron.grpo.rewards import RewardFailure
from megatron.grpo.samplers import ResidentSampler


def evaluate(sampler: ResidentSampler, scorer: RewardScorer, prompts: list[Prompt], dp: dist.ProcessGroup) -> float:
    """Mean reward over `prompts`, equal on every rank; NaN where --reward-failure mask leaves none.

    Raises StepRejected, on every rank, where one cannot score (--reward-failure stop).
    """
    own = prompts[dp.rank() :: dp.size()]
    groups = [sampler.answer(prompt, 1, "evaluation", keep_state=False, version=0) for prompt in own]
    sampler.finish()
    failure = ""
    try:
        if own:
            scorer.score(own, groups)
    except RewardFailure as error:
        failure = str(error)
    failure = agree_on_failure(failure, dist.group.WORLD)
    if failure:
        raise StepRejected(failure)
    rewards = [reward for group in groups for reward, kept in zip(group.rewards, group.kept) if kept]
    total = torch.tensor([sum(rewards), float(len(rewards))], dtype=torch.float64, device=sampler.device)
    dist.all_reduce(total, group=dp)
    return (total[0] / total[1]).item() if total[1] else math.nan
