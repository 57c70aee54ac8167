"""What a reward is: its configuration, its sample, its result, and what happens where there is none.

`reward_pool.RewardPool` computes rewards, each in a worker process with a time limit; `reward_functions` holds the
built-in ones and finds the user's. A sample whose reward could not be had carries a status instead of a number:
nothing is ever scored as if it were known.

Left out: rewards that compare the responses of a group with each other, and process rewards for single tokens.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Optional


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """How responses are scored."""

    reward: list[str] = field(default_factory=lambda: ["exact_match"])
    """Reward functions: exact_match, math_verify, reasoning_gym, package.module:function or path/to/file.py:function.
    Several are added up. A function takes (prompt, response, answer, extra) and returns one number."""

    reward_weights: Optional[list[float]] = None
    """One weight for each reward function; 1 each if not given."""

    reward_timeout: float = 10.0
    """Seconds that one sample may take, all its reward functions together. A process that takes longer is killed."""

    reward_workers: int = 4
    """Processes that score samples side by side, on each rank that scores."""

    reward_failure: Literal["zero", "mask", "stop"] = "zero"
    """What a sample whose reward raises, times out or is not a finite number counts as: zero gives it reward 0, mask
    leaves it out of its group and of the loss, stop ends the run with its message."""

    def __post_init__(self) -> None:
        if not self.reward:
            raise ValueError("--reward must name at least one reward function")
        if self.reward_weights is not None:
            if len(self.reward_weights) != len(self.reward):
                raise ValueError(
                    f"--reward-weights has {len(self.reward_weights)} values for {len(self.reward)} in --reward"
                )
            if not all(math.isfinite(weight) for weight in self.reward_weights):
                raise ValueError(f"--reward-weights must be finite numbers, not {self.reward_weights}")
        if not (math.isfinite(self.reward_timeout) and self.reward_timeout > 0):
            raise ValueError(f"--reward-timeout must be a positive number of seconds, not {self.reward_timeout}")
        if self.reward_workers < 1:
            raise ValueError(f"--reward-workers must be at least 1, not {self.reward_workers}")
        if self.reward_failure not in ("zero", "mask", "stop"):
            raise ValueError(f"--reward-failure must be zero, mask or stop, not {self.reward_failure!r}")

    @property
    def weights(self) -> list[float]:
        """The weight of each reward function."""
        return [1.0] * len(self.reward) if self.reward_weights is None else list(self.reward_weights)


@dataclass(frozen=True, kw_only=True)
class RewardSample:
    """What a reward function is called with."""

    prompt: str
    response: str
    answer: str
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """The reward of one sample, or why there is none."""

    value: float | None
    """The weighted sum; None unless `status` is "ok"."""

    status: Literal["ok", "timeout", "error", "invalid"]
    """timeout: killed after --reward-timeout. error: the function raised, or its process died. invalid: it returned
    something other than one finite number, or the weighted sum is not finite."""

    message: str = ""
    """What happened, in a sentence; empty if "ok"."""

    components: tuple[float, ...] = ()
    """Each function's own value before weighting, in the order of --reward; empty unless "ok"."""


class RewardFailure(RuntimeError):
    """A sample has no reward and `--reward-failure stop` was asked for."""


def apply_failure_policy(
    results: Sequence[RewardResult], policy: Literal["zero", "mask", "stop"]
) -> tuple[list[float], list[bool]]:
    """Turn results into rewards.

    Returns:
        (rewards, kept), both as long as `results`. A sample without a reward has reward 0.0; it is kept under
        "zero", and not kept (to be left out of its group's statistics and of the loss) under "mask".

    Raises:
        RewardFailure: policy "stop" and at least one sample has no reward.
    """
    failed = [(index, result) for index, result in enumerate(results) if result.status != "ok"]
    if failed and policy == "stop":
        index, first = failed[0]
        raise RewardFailure(
            f"{len(failed)} of {len(results)} samples have no reward (--reward-failure stop); "
            f"the first is sample {index}: {first.status}: {first.message}"
        )
    rewards = [0.0 if result.value is None else result.value for result in results]
    kept = [result.status == "ok" or policy == "zero" for result in results]
    return rewards, kept


def count_statuses(results: Sequence[RewardResult]) -> dict[str, int]:
    """How many samples ended with each status, for the metrics of a step; every status is a key."""
    counts = Counter(result.status for result in results)
    return {status: counts[status] for status in ("ok", "timeout", "error", "invalid")}
