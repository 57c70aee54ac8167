"""Advantages of a group's responses from their rewards, and the filter that drops groups with nothing to learn.

G responses of a group, N groups.

A group whose rewards are all equal carries no signal, so its advantages must be exactly 0. Two things could break
that: the rounding of a mean (seven times 0.7 does not average to 0.7), and dividing rounding noise by a standard
deviation made of the same noise. Both are closed here: rewards are shifted by the group's first reward before
anything is averaged, and rewards that differ by no more than rounding are taken as equal.

The estimator running_mean compares with rewards of earlier steps instead (`RewardBaseline`), so that one response a prompt
will do; there a group with equal rewards does carry signal.

Left out: reward shaping (rewards arrive shaped; the filter gets the raw outcomes), baselines learnt by a critic.
"""

import math
from dataclasses import dataclass
from typing import Callable, Iterable, Sequence, TypeVar, Union

import torch

from longstraw.objectives.config import ObjectiveConfig

UNIFORM_TOLERANCE = 1e-6
"""Rewards closer than this, relative to the group's largest, are equal: about eight float32 roundings."""

Rewards = Union[torch.Tensor, Sequence[float], Sequence[Sequence[float]]]
Group = TypeVar("Group")


class UniformGroupsError(RuntimeError):
    """Every sampled group had equal outcomes, so there is nothing to train on."""


def is_uniform(rewards: Rewards) -> torch.Tensor:
    """Whether all rewards of a group are equal, up to rounding (`UNIFORM_TOLERANCE`).

    Args:
        rewards: [G] or [N, G].

    Returns:
        bool, [] or [N].

    Raises:
        ValueError: a reward is NaN or infinite, or a group is empty.
    """
    rewards = _as_rewards(rewards)
    spread = rewards.amax(-1) - rewards.amin(-1)
    return spread <= UNIFORM_TOLERANCE * rewards.abs().amax(-1)


def group_advantages(rewards: Rewards, *, std_normalization: bool) -> torch.Tensor:
    """A_i = R_i - mean(R), divided by the sample standard deviation of R if asked.

    GRPO, arXiv 2402.03300, section 4.1.2; without the division Dr.GRPO, arXiv 2503.20783. No constant is added to the
    standard deviation: uniform groups never reach the division.

    Args:
        rewards: [G] or [N, G]; groups of other sizes are passed one by one.
        std_normalization: divide by the standard deviation (with G - 1 in it).

    Returns:
        float64, the shape of rewards. Uniform groups are exactly 0.

    Raises:
        ValueError: a reward is NaN or infinite, or a group holds fewer than 2.
    """
    deviations = _deviations(rewards)
    advantages = deviations - deviations.mean(-1, keepdim=True)
    if std_normalization:
        std = advantages.square().sum(-1, keepdim=True).div(advantages.shape[-1] - 1).sqrt()
        # Where std is 0 the advantages are 0: any divisor gives the right value.
        advantages = advantages / torch.where(std > 0, std, 1.0)
    return advantages


def leave_one_out_advantages(rewards: Rewards) -> torch.Tensor:
    """A_i = R_i - mean of the other responses' rewards.

    RLOO: Ahmadian et al. 2024, arXiv 2402.14740. Never divided by a standard deviation: that of the others can be
    nothing but rounding noise while response i differs from them.

    Args:
        rewards: [G] or [N, G].

    Returns:
        float64, the shape of rewards. Uniform groups are exactly 0.

    Raises:
        ValueError: a reward is NaN or infinite, or a group holds fewer than 2.
    """
    deviations = _deviations(rewards)
    others = (deviations.sum(-1, keepdim=True) - deviations) / (deviations.shape[-1] - 1)
    return deviations - others


@dataclass(kw_only=True)
class RewardBaseline:
    """The mean of the rewards of earlier steps, over all prompts of all replicas.

        count <- decay count + n        value <- value + n / count (mean of the step's n rewards - value)

    With decay 1 it is the plain mean. Before the first reward it is 0, and advantages are the rewards themselves: a
    baseline made of the step's own rewards would be one that depends on the responses it judges.
    """

    value: float = 0.0
    count: float = 0.0

    def update(self, rewards: Iterable[float], *, decay: float = 1.0) -> None:
        """Take in a step's rewards, after the step has used `value`. No rewards leave it as it is.

        The sum is rounded once, so that the order of the rewards, and how replicas share them, changes no bit.

        Raises:
            ValueError: a reward is NaN or infinite.
        """
        rewards = list(rewards)
        if not rewards:
            return
        if not all(map(math.isfinite, rewards)):
            raise ValueError(f"Rewards must be finite, got {rewards}.")
        self.count = decay * self.count + len(rewards)
        self.value += len(rewards) / self.count * (math.fsum(rewards) / len(rewards) - self.value)

    def state_dict(self) -> dict[str, float]:
        """Plain values, which bring it back bit for bit."""
        return {"value": self.value, "count": self.count}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from saved values."""
        self.value, self.count = state["value"], state["count"]


def compute_advantages(rewards: Rewards, config: ObjectiveConfig, *, baseline: float = 0.0) -> torch.Tensor:
    """The advantages that the config names. Shapes, dtype and errors as `group_advantages`.

    baseline: `RewardBaseline.value`, which running_mean alone reads; a group may then hold one response.
    """
    if config.advantage_estimator == "running_mean":
        return _as_rewards(rewards) - baseline
    if config.advantage_estimator == "leave_one_out":
        return leave_one_out_advantages(rewards)
    return group_advantages(rewards, std_normalization=config.advantage_std_normalization)


def keeps_group(outcomes: Rewards, config: ObjectiveConfig) -> bool:
    """Whether the group filter keeps a group. A group is kept or dropped whole.

    Args:
        outcomes: [G] raw outcomes: what the verifier said, before length penalties or other shaping. A shaped reward
            would make a group with one and the same outcome look like signal.
        config: names the filter.
    """
    return config.group_filter == "none" or not bool(is_uniform(outcomes))


def collect_groups(
    sample_groups: Callable[[int, int], Sequence[Group]],
    outcomes: Callable[[Group], Rewards],
    num_groups: int,
    config: ObjectiveConfig,
    *,
    sum_over_dp: Callable[[int], int] = lambda count: count,
) -> list[Group]:
    """Sample groups, drop the uniform ones, and sample again for those dropped, a bounded number of times.

    Under data parallelism every rank makes the same number of attempts, so a rank whose groups are complete is asked
    for 0 more while others still look: `sample_groups` may then hold collectives.

    Args:
        sample_groups: `sample_groups(missing, attempt)` returns `missing` groups; `attempt` counts from 0.
        outcomes: the raw outcomes [G] of a group.
        num_groups: groups this rank wants.
        config: the filter and `group_filter_retries`.
        sum_over_dp: sums an int over the data-parallel ranks; the identity for one rank.

    Returns:
        The kept groups in the order sampled: num_groups of them, or fewer when the retries ran out (a rank may then
        hold none while others have some).

    Raises:
        UniformGroupsError: after all retries no rank kept a group.
        ValueError: `sample_groups` returned another number of groups than asked.
    """
    kept: list[Group] = []
    attempts = config.group_filter_retries + 1
    for attempt in range(attempts):
        missing = num_groups - len(kept)
        groups = sample_groups(missing, attempt)
        if len(groups) != missing:
            raise ValueError(f"{missing} groups were asked for and {len(groups)} were sampled.")
        kept += [group for group in groups if keeps_group(outcomes(group), config)]
        if sum_over_dp(num_groups - len(kept)) == 0:
            return kept
    if sum_over_dp(len(kept)) == 0:
        raise UniformGroupsError(
            f"All responses of a group had the same outcome, in every group of {attempts} attempts: the prompts are all "
            "too easy or too hard for this policy. Change the prompts or the reward, or raise --group-size or "
            "--group-filter-retries, or train on uniform groups with --group-filter none."
        )
    return kept


def _deviations(rewards: Rewards) -> torch.Tensor:
    """Rewards minus the group's first, float64. Exactly 0 throughout a uniform group."""
    rewards = _as_rewards(rewards)
    if rewards.shape[-1] < 2:
        raise ValueError(f"An advantage compares responses: a group needs at least 2, got {rewards.shape[-1]}.")
    deviations = rewards - rewards[..., :1]
    return deviations.masked_fill(is_uniform(rewards)[..., None], 0.0)


def _as_rewards(rewards: Rewards) -> torch.Tensor:
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    if rewards.dim() not in (1, 2) or rewards.shape[-1] == 0:
        raise ValueError(f"Rewards must be [G] or [N, G] with at least one response, got {list(rewards.shape)}.")
    if not bool(torch.isfinite(rewards).all()):
        raise ValueError(f"Rewards must be finite, got {rewards.tolist()}.")
    return rewards
