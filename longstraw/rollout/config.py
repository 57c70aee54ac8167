"""How responses are sampled. Every field is a flag (`sampling_top_p` -> `--sampling-top-p`).

Left out: stop token ids, which come from the tokenizer, and seeds, which come with the generator.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Rollout sampling: temperature, truncation and the longest response."""

    sampling_temperature: float = 1.0
    """Divides the logits before sampling, and wherever sampled tokens are scored. 0 takes the likeliest token
    (greedy), which cannot be trained on."""

    sampling_top_p: float = 1.0
    """Sample from the smallest set of tokens whose probabilities reach this sum. 1 keeps every token."""

    sampling_top_k: int = 0
    """Sample from the likeliest this many tokens. 0 keeps every token. Applied before --sampling-top-p."""

    max_response_length: int = 1024
    """Tokens of a response at most, the stop token included."""

    def __post_init__(self) -> None:
        """Refuse values out of range.

        Raises:
            ValueError: in one sentence that names the flag.
        """
        if not (math.isfinite(self.sampling_temperature) and self.sampling_temperature >= 0.0):
            raise ValueError(
                f"--sampling-temperature must be finite and at least 0, got {self.sampling_temperature}."
            )
        if not 0.0 < self.sampling_top_p <= 1.0:
            raise ValueError(f"--sampling-top-p must lie in (0, 1], got {self.sampling_top_p}.")
        if self.sampling_top_k < 0:
            raise ValueError(f"--sampling-top-k must be at least 0 (0 switches it off), got {self.sampling_top_k}.")
        if self.max_response_length < 1:
            raise ValueError(f"--max-response-length must be at least 1, got {self.max_response_length}.")
