"""The objective's settings: which advantage, which ratio, which clip range, which normaliser, which KL.

Every field is a command-line flag (`clip_range_low` -> `--clip-range-low`) and its docstring is the flag's help.
`longstraw.objectives.presets` names the published objectives that these fields spell.

Left out: learning rates and the optimizer (Megatron's own flags), sampling (`longstraw.rollout.config`).
"""

import math
from dataclasses import dataclass, fields
from typing import Literal, Optional, get_args, get_origin


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Objective: group advantages, policy loss, KL term and how the loss is averaged."""

    group_size: int = 8
    """Responses sampled for one prompt. Advantages compare a response with the others of its group; 1 needs
    --advantage-estimator running_mean."""

    advantage_estimator: Literal["group", "leave_one_out", "running_mean"] = "group"
    """What a reward is compared with: the mean of its whole group, the mean of the other responses (RLOO), or the mean of
    the rewards of all prompts in the steps before. The last two need --no-advantage-std-normalization."""

    reward_baseline_decay: float = 1.0
    """What a step leaves of the weight of earlier rewards in the mean of --advantage-estimator running_mean: 1 is the plain
    mean of all rewards of the run, 0.9 one over about ten steps."""

    advantage_std_normalization: bool = True
    """The group's advantages are divided by the sample standard deviation of its rewards; the --no form leaves them
    undivided (Dr.GRPO)."""

    clip_range_low: float = 0.2
    """The ratio is clipped below at 1 - this."""

    clip_range_high: float = 0.2
    """The ratio is clipped above at 1 + this. DAPO raises it above --clip-range-low."""

    importance_level: Literal["token", "sequence"] = "token"
    """Ratio of each token, or one ratio a response: the exponential of its mean log-ratio (GSPO)."""

    loss_aggregation: Literal["token", "sequence", "group_constant"] = "token"
    """What the summed loss is divided by: all trained tokens of the step; each response's own tokens and then the
    number of responses; or --loss-constant times the number of responses (Dr.GRPO)."""

    loss_constant: Optional[int] = None
    """Divisor of a response's summed loss under --loss-aggregation group_constant, for instance the longest response
    allowed."""

    kl_coefficient: float = 0.0
    """Weight of the KL term towards the reference policy. 0 leaves the term out."""

    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How a token's KL is estimated from its two log-probabilities; see longstraw.objectives.losses for the gradient
    each one has."""

    group_filter: Literal["none", "drop_uniform"] = "none"
    """drop_uniform leaves out whole groups whose outcomes are all equal, since their advantages are 0 (DAPO's dynamic
    sampling)."""

    group_filter_retries: int = 4
    """How often more groups are sampled to replace dropped ones before the step goes on with those it has, or stops
    with an error when it has none."""

    logprob_chunk_tokens: int = 1024
    """Tokens whose logits exist at once while log-probabilities are computed."""

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant, in one sentence that names the flags.

        Raises:
            ValueError: a value out of range, or two settings that exclude each other.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if get_origin(field.type) is Literal and value not in get_args(field.type):
                choices = ", ".join(get_args(field.type))
                raise ValueError(f"{flag(field.name)} must be one of {choices}, got {value!r}.")

        for name, lowest in (("group_size", 1), ("group_filter_retries", 0), ("logprob_chunk_tokens", 1)):
            if getattr(self, name) < lowest:
                raise ValueError(f"{flag(name)} must be at least {lowest}, got {getattr(self, name)}.")
        if self.group_size == 1 and self.advantage_estimator != "running_mean":
            raise ValueError(
                f"--group-size 1 leaves --advantage-estimator {self.advantage_estimator} no other response to compare with: "
                "use at least 2, or --advantage-estimator running_mean."
            )
        if not 0.0 < self.reward_baseline_decay <= 1.0:
            raise ValueError(f"--reward-baseline-decay must lie in (0, 1], got {self.reward_baseline_decay}.")

        if not 0.0 <= self.clip_range_low <= 1.0:
            raise ValueError(f"--clip-range-low must lie in [0, 1], got {self.clip_range_low}.")
        for name in ("clip_range_high", "kl_coefficient"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"{flag(name)} must be finite and at least 0, got {value}.")

        if self.advantage_estimator != "group" and self.advantage_std_normalization:
            raise ValueError(
                f"--advantage-estimator {self.advantage_estimator} is not divided by a standard deviation: add "
                "--no-advantage-std-normalization."
            )
        if self.advantage_estimator == "running_mean" and self.group_filter != "none":
            raise ValueError(
                f"--group-filter {self.group_filter} drops groups with equal outcomes, whose advantages are not 0 under "
                "--advantage-estimator running_mean: use --group-filter none."
            )
        if self.loss_aggregation == "group_constant":
            if self.loss_constant is None or self.loss_constant < 1:
                raise ValueError(
                    "--loss-aggregation group_constant needs --loss-constant of at least 1, got "
                    f"{self.loss_constant}."
                )
        elif self.loss_constant is not None:
            raise ValueError(
                f"--loss-constant {self.loss_constant} is read only with --loss-aggregation group_constant, but "
                f"--loss-aggregation is {self.loss_aggregation}."
            )


def flag(field_name: str) -> str:
    """The command-line flag of a config field."""
    return "--" + field_name.replace("_", "-")
