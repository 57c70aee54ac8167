"""What every rollout engine takes and gives.

Prompts go in with an id and the version of the weights; samples come out with the very token ids that were sampled
(nothing is ever tokenised again), the sampler's log-probabilities, and why each one ended.
"""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One response. token_ids: the stop token included, where there is one. logprobs: the sampler's, of each token."""

    prompt_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    weight_version: int
