"""The flags of LoRA, the baseline that trains low-rank pairs instead of the weights (`megatron.grpo.lora`)."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adaptation (LoRA) instead of training the weights."""

    lora_rank: int = 0
    """Train low-rank pairs of this rank on the projection matrices (attention, gated delta net, MLP, experts) and freeze
    all weights; 0 trains the weights."""

    lora_alpha: float = 32.0
    """Factor of a pair's product, together with 1 / --lora-rank."""

    def __post_init__(self) -> None:
        """Refuse values out of range.

        Raises:
            ValueError: in one sentence that names the flag.
        """
        if self.lora_rank < 0:
            raise ValueError(f"--lora-rank must be at least 0, not {self.lora_rank}")
        if not 0.0 < self.lora_alpha < math.inf:
            raise ValueError(f"--lora-alpha must be above 0 and finite, not {self.lora_alpha}")
