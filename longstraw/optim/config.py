"""The settings of sketched and KL-controlled updates: three independent axes, and what each choice reads.

Every field is a command-line flag (`logra_rank` -> `--logra-rank`) and its docstring is the flag's help.

    direction   sketch: of the sketched weights only S is accumulated; dense: ordinary gradients
    rule        sgd, rowadam (a moment a row), adam (moments an element; needs dense)
    step size   learning-rate, update-ratio (a fixed ||dW|| / ||W||), predicted-kl

Left out: learning rates, Adam's betas and weight decay, which are Megatron's flags.
"""

import math
from dataclasses import dataclass, fields
from typing import Literal, Optional, get_args, get_origin


@dataclass(frozen=True, kw_only=True)
class LograConfig:
    """Updates: direction, rule, step size, gradient sketches and the predicted KL."""

    update_direction: Literal["dense", "sketch"] = "sketch"
    """What is accumulated over a step: the gradient of every trained weight, or of projection matrices (attention,
    gated delta net, MLP, experts) only its product with a small random matrix."""

    update_rule: Literal["sgd", "rowadam", "adam"] = "rowadam"
    """What makes the direction: the accumulated gradient itself; divided by a moving root mean square of each output
    row (rescaled to the norm it had); or Adam, which needs --update-direction dense."""

    update_step_size: Literal["learning-rate", "update-ratio", "predicted-kl"] = "predicted-kl"
    """How far a step goes: --lr; the length that makes ||dW|| / ||W|| --logra-update-ratio; or that length times the
    alpha at which the policy is predicted to move by the KL budget."""

    logra_rank: int = 256
    """Rows of the random matrix, hence columns of a sketch. A sketch has this many numbers an output row instead of as
    many as the weight has inputs."""

    logra_projection: Literal["rademacher", "gaussian"] = "rademacher"
    """Distribution of the random matrix: signs, or normal numbers. Signs are exact in 16 bits and cheaper to make."""

    logra_refresh: int = 1
    """Optimizer steps between two draws of the random matrices; 0 keeps the first for the whole run."""

    logra_seed: int = 1234
    """Seed of the random matrices. With the step and a weight's name it is all that is ever stored of them."""

    logra_cosine_of: Optional[str] = None
    """Name of a sketched matrix (decoder.layers.0.mlp.linear_fc1.weight) whose whole gradient is formed too, so that
    every step reports the cosine between it and what its sketch keeps of it."""

    logra_delta_dir: Optional[str] = None
    """Folder for each step's update as a file: the factors, the seed and checksums of the weights before and after, from
    which an inference engine follows the trainer (longstraw/rollout/weight_delta.py)."""

    logra_train_rest: bool = False
    """Train the weights that are not sketched (norms, embeddings, routers, biases) by Adam at --lr; otherwise they are
    frozen."""

    logra_update_ratio: float = 6e-5
    """||dW|| / ||W|| of a step at alpha 1."""

    logra_beta2: float = 0.95
    """Decay of the row moments of --update-rule rowadam."""

    logra_masters: Literal["float32", "remainder"] = "remainder"
    """How bfloat16 weights keep updates far below their resolution: a float32 copy (4 bytes a weight), or the 16 bits
    that the bfloat16 weight lacks of it (2 bytes). The same updates, bit for bit."""

    logra_master_residency: Literal["device", "host"] = "device"
    """Where the masters of bfloat16 weights are kept."""

    kl_budget: float = 2e-4
    """KL that one step may move the policy by, in nats a token, at the start of the run."""

    kl_budget_final: float = 2e-5
    """The KL budget at the end of --kl-budget-schedule cosine."""

    kl_budget_schedule: Literal["constant", "cosine"] = "cosine"
    """constant: --kl-budget throughout; cosine: half a cosine from --kl-budget to --kl-budget-final."""

    kl_budget_steps: Optional[int] = None
    """Steps after which --kl-budget-schedule cosine has reached --kl-budget-final. Default: the last of --train-iters, so a
    run that is to be extended wants its own number."""

    kl_alpha_max: float = 3.0
    """The largest alpha, whatever the budget allows."""

    kl_probe: Literal["jvp", "finite-difference"] = "jvp"
    """How the predicted KL is found: forward-mode derivatives of the logits along the update, or the KL measured at
    --kl-probe-step to both sides of the weights."""

    kl_probe_scope: Literal["full", "response"] = "response"
    """Whether a probe moves the prompt's state with the weights (full: another pass over the prompt), or holds it as
    captured (response)."""

    kl_probe_tokens: int = 4096
    """Response tokens that a probe reads of each probed response, at most."""

    kl_probe_responses: int = 2
    """Responses of a step that a probe reads, in every model replica."""

    kl_probe_prompts: int = 1
    """Prompts of a step that they belong to, from the last one replayed back, in every model replica. Each keeps its
    captured state until the step is taken."""

    kl_probe_step: float = 0.5
    """The first alpha at which --kl-probe finite-difference measures the KL, to both sides; it is shortened until that KL
    is at most a tenth of the budget."""

    kl_mismatch_weight: float = 0.3
    """Weight of the newest measurement in the moving average of the KL between rollout and trainer at equal weights,
    which is taken from the budget."""

    kl_budget_floor: float = 0.5
    """Part of the KL budget that always stays, however large the mismatch between rollout and trainer."""

    kl_refused_step: Literal["continue", "stop"] = "continue"
    """After a step that was rolled back because its predicted KL was not finite: go on with the next, or end the
    run."""

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

        lowest_values = (
            ("logra_rank", 1), ("logra_refresh", 0), ("kl_probe_tokens", 1), ("kl_probe_responses", 1),
            ("kl_probe_prompts", 1),
        )
        for name, lowest in lowest_values:
            if getattr(self, name) < lowest:
                raise ValueError(f"{flag(name)} must be at least {lowest}, got {getattr(self, name)}.")
        if self.kl_budget_steps is not None and self.kl_budget_steps < 1:
            raise ValueError(f"--kl-budget-steps must be at least 1, got {self.kl_budget_steps}.")
        if not 0 <= self.logra_seed < 2**63:
            raise ValueError(f"--logra-seed must lie in [0, 2^63), got {self.logra_seed}.")
        for name in ("logra_delta_dir", "logra_cosine_of"):
            if getattr(self, name) == "":
                raise ValueError(f"{flag(name)} is empty: give it a name, or leave it out.")
        for name, highest in (("kl_budget", 10.0), ("kl_budget_final", 10.0), ("logra_update_ratio", 1.0)):
            if getattr(self, name) > highest:
                raise ValueError(f"{flag(name)} must be at most {highest:g}, got {getattr(self, name)}.")
        for name in ("logra_update_ratio", "kl_budget", "kl_budget_final", "kl_alpha_max", "kl_probe_step"):
            value = getattr(self, name)
            if not 0.0 < value < math.inf:
                raise ValueError(f"{flag(name)} must be above 0 and finite, got {value}.")
        if not 0.0 <= self.logra_beta2 < 1.0:
            raise ValueError(f"--logra-beta2 must lie in [0, 1), got {self.logra_beta2}.")
        for name in ("kl_mismatch_weight", "kl_budget_floor"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"{flag(name)} must lie in (0, 1], got {getattr(self, name)}.")

        if self.update_direction == "sketch" and self.update_rule == "adam":
            raise ValueError(
                "--update-rule adam keeps a moment an element, which means nothing under the next draw of a sketch: "
                "use rowadam or sgd with --update-direction sketch, or --update-direction dense."
            )
        if self.update_step_size == "predicted-kl" and (self.kl_probe, self.kl_probe_scope) == ("jvp", "full"):
            raise ValueError(
                "--kl-probe jvp holds the prompt's state, which carries no derivative from chunk to chunk: use --kl-probe "
                "finite-difference with --kl-probe-scope full."
            )
        if self.logra_delta_dir is not None and (self.update_direction != "sketch" or self.logra_train_rest):
            raise ValueError(
                "--logra-delta-dir writes what sketches move: it needs --update-direction sketch, without --logra-train-rest."
            )
        if self.logra_cosine_of and self.update_direction != "sketch":
            raise ValueError("--logra-cosine-of compares a sketch: it needs --update-direction sketch.")
        if self.kl_budget_schedule == "cosine" and self.kl_budget_final > self.kl_budget:
            raise ValueError(
                f"--kl-budget-final {self.kl_budget_final} is above --kl-budget {self.kl_budget}: the cosine only "
                "lowers the budget."
            )

    def draw(self, step: int) -> int:
        """Which draw of the random matrices an optimizer step uses; steps count from 0."""
        return step // self.logra_refresh if self.logra_refresh else 0


def flag(field_name: str) -> str:
    """The command-line flag of a config field."""
    return "--" + field_name.replace("_", "-")
