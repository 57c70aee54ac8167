"""The run's own settings, and the one record that holds all of them.

`RunConfig` has what is neither the model's, the data's, the objective's nor Megatron's. `TrainConfig` is what
`megatron.grpo.arguments.parse_arguments` gives beside Megatron's namespace: every setting of ours, frozen.

Left out: steps (`--train-iters`), evaluation interval (`--eval-interval`), learning rates and checkpoints, which are
Megatron's flags.
"""

from dataclasses import dataclass
from typing import Literal, Optional

from longstraw.objectives.config import ObjectiveConfig
from longstraw.objectives.mismatch import MismatchConfig
from longstraw.optim.config import LograConfig
from longstraw.rollout.config import SamplingConfig
from longstraw.sweep_config import SweepConfig
from megatron.grpo.lora_config import LoraConfig
from megatron.grpo.prompts import DataConfig
from megatron.grpo.rewards import RewardConfig
from megatron.grpo.rollout_config import RolloutConfig
from megatron.grpo.weight_sync_config import WeightSyncConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run: model, outputs, evaluation and the reference policy."""

    model_preset: Optional[str] = None
    """Architecture, by name: qwen3.6-27b, glm-5.2, smollm2-135m, or small ones to try things on: tiny-qwen3.6, tiny-llama,
    tiny-qwen3, tiny-glm5.2 (all: megatron/grpo/presets/). It sets the defaults of Megatron's model flags; a flag given
    explicitly wins, so that another size of a family is its preset and a few flags. Required."""

    output_dir: Optional[str] = None
    """Folder of metrics, plots, TensorBoard events and the receipt. Default: runs/ and the preset's name. Two runs
    cannot share it at one time."""

    eval_samples: int = 64
    """Held-out prompts of --eval-data that each evaluation answers, from the first on."""

    responses_per_replay: int = 1
    """Responses of a group that are replayed together. More of them keep a device busier and hold more live graph; the
    gradient is the same."""

    weights_checksum: Literal["step", "run"] = "step"
    """When receipts take a checksum of the weights: after each step, or only before and after the run (steps then carry the
    one from before the run). It reads every weight once, about a second a GB."""

    mask_truncated: bool = False
    """Leave responses that reached --max-response-length without a stop token out of the loss and of what it is divided
    by (DAPO's overlong filtering); their rewards still count in their group's statistics."""

    reference_checkpoint: Optional[str] = None
    """Checkpoint folder whose weights are the reference policy of the KL term, held in host memory. Default: the
    weights that the run started from, for a resumed run those of --pretrained-checkpoint."""

    def __post_init__(self) -> None:
        """Refuse values out of range.

        Raises:
            ValueError: in one sentence that names the flag.
        """
        if not self.model_preset:
            raise ValueError("--model-preset is required: the name of an architecture, such as tiny-qwen3.6")
        if self.output_dir == "":
            raise ValueError("--output-dir must name a folder")
        for name in ("eval_samples", "responses_per_replay"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")

    @property
    def output_folder(self) -> str:
        """`output_dir`, or its default."""
        return self.output_dir or f"runs/{self.model_preset}"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Every setting of ours, one record for each group of flags."""

    run: RunConfig
    data: DataConfig
    sampling: SamplingConfig
    rewards: RewardConfig
    objective: ObjectiveConfig
    sweeps: SweepConfig
    logra: LograConfig
    lora: LoraConfig = LoraConfig()
    rollouts: RolloutConfig = RolloutConfig()
    mismatch: MismatchConfig = MismatchConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()

    def __post_init__(self) -> None:
        """Refuse settings of two groups that exclude each other.

        Raises:
            ValueError: in one sentence that names both flags.
        """
        if self.sampling.sampling_temperature == 0.0:
            raise ValueError(
                "--sampling-temperature 0 always gives the same response, which GRPO cannot learn from: set it above 0"
            )
        if self.run.responses_per_replay > self.objective.group_size:
            raise ValueError(
                f"--responses-per-replay {self.run.responses_per_replay} is more than the group has: --group-size "
                f"{self.objective.group_size}"
            )
        if self.run.reference_checkpoint and self.objective.kl_coefficient == 0.0:
            raise ValueError(
                f"--reference-checkpoint {self.run.reference_checkpoint} is read only with --kl-coefficient above 0"
            )
        if self.rollouts.rollout_only and self.weight_sync.weight_sync_only:
            raise ValueError("--rollout-only builds no model, whose weights --weight-sync-only would write: use one of them")
        if self.mismatch.rollout_is == "token" and self.objective.importance_level == "sequence":
            raise ValueError(
                "--rollout-is token would weigh the tokens of a response differently, whose ratio --importance-level sequence "
                "takes as one: use --rollout-is sequence"
            )
        if self.objective.logprob_chunk_tokens != self.sweeps.logprob_chunk_tokens:
            raise ValueError(
                f"--logprob-chunk-tokens has two values: {self.objective.logprob_chunk_tokens} and "
                f"{self.sweeps.logprob_chunk_tokens}"
            )


CONFIG_GROUPS = {
    "run": (RunConfig, "run"),
    "data": (DataConfig, "prompts"),
    "sampling": (SamplingConfig, "rollout"),
    "rollouts": (RolloutConfig, "rollout source and store"),
    "weight_sync": (WeightSyncConfig, "weights for a rollout engine"),
    "rewards": (RewardConfig, "rewards"),
    "objective": (ObjectiveConfig, "objective"),
    "mismatch": (MismatchConfig, "mismatch of rollout and trainer"),
    "sweeps": (SweepConfig, "sweeps: how the exact gradient is computed"),
    "logra": (LograConfig, "LoGRA: updates from gradient sketches, under --optimizer logra"),
    "lora": (LoraConfig, "lora: low-rank adaptation"),
}
"""Field of TrainConfig -> (its class, the title of its flags in --help), in the order of --help."""
