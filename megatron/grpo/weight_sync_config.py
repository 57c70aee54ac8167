"""Flags of the weights that a rollout engine follows the training run with."""

from argparse import Namespace
from dataclasses import dataclass
from typing import Literal, Optional

from megatron.grpo.presets import ModelPreset


@dataclass(frozen=True, kw_only=True)
class WeightSyncConfig:
    """What is written after each step for a rollout engine."""

    weight_sync: Literal["none", "full", "delta", "lora"] = "none"
    """What each step leaves in --weight-sync-dir for a rollout engine: `full`, the whole weights as a Hugging Face folder,
    written by the ranks in parallel, low-rank pairs merged in; `delta`, the update of --optimizer logra, a small part of that; `lora`, the pairs of
    --lora-rank as an adapter in PEFT's format."""

    weight_sync_dir: Optional[str] = None
    """Folder of the weight versions, version-K after step K, which the ranks and the engine see: /dev/shm or a local disk
    on one machine, a shared one on several."""

    weight_sync_full_interval: int = 16
    """With --weight-sync delta, write the whole weights instead of an update at every this many steps, so that an engine
    that starts anew reads few folders. 0: only at the run's start."""

    weight_sync_keep: int = 2
    """Versions to keep in --weight-sync-dir, besides those that they build on. 0 keeps all."""

    weight_sync_only: bool = False
    """Write the version of the checkpoint in --load, unless it is there, and end without a step: for a folder that was lost."""

    def __post_init__(self) -> None:
        """Refuse values that do not fit together.

        Raises:
            ValueError: in one sentence that names the flags.
        """
        if self.weight_sync not in ("none", "full", "delta", "lora"):
            raise ValueError(f"--weight-sync must be none, full, delta or lora, not {self.weight_sync!r}")
        if self.weight_sync != "none" and not self.weight_sync_dir:
            raise ValueError(f"--weight-sync {self.weight_sync} needs --weight-sync-dir, where to write")
        if self.weight_sync == "none" and self.weight_sync_dir is not None:
            raise ValueError(f"--weight-sync-dir {self.weight_sync_dir} is written only with --weight-sync full, delta or lora")
        if self.weight_sync_only and self.weight_sync == "none":
            raise ValueError("--weight-sync-only writes nothing without --weight-sync full, delta or lora")
        for name in ("weight_sync_full_interval", "weight_sync_keep"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 0, not {getattr(self, name)}")


def check_weight_sync(args: Namespace, preset: ModelPreset) -> list[str]:
    """One sentence for each combination that cannot be run."""
    kind, found = args.weight_sync, []
    if args.weight_sync_only and not args.load:
        found.append("--weight-sync-only writes the weights of a checkpoint: name its folder by --load")
    if kind == "delta":
        if args.optimizer != "logra" or args.update_direction != "sketch":
            found.append("--weight-sync delta writes the updates of --optimizer logra with --update-direction sketch")
        if args.logra_delta_dir:
            found.append("--weight-sync delta writes the updates itself: leave out --logra-delta-dir")
    if kind == "lora":
        if args.lora_rank == 0:
            found.append("--weight-sync lora writes the pairs of --lora-rank, which is 0")
        if preset.hybrid or preset.has_experts or preset.multi_latent_attention:
            found.append(
                f"--weight-sync lora is for plain attention and MLP layers, and --model-preset {preset.name} has others that "
                "an engine takes no adapter of: use --weight-sync full"
            )
    return found
