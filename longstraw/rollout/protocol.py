"""What every rollout engine takes and gives.

Prompts go in with an id and the version of the weights; samples come out with the very token ids that were sampled
(nothing is ever tokenised again), the sampler's log-probabilities, and why each one ended.

A weight version is the number of optimizer steps behind the weights: a step-K rollout is one of version K - 1. An engine
that holds another version than a request names, or none, refuses: `WeightVersionError`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from longstraw.rollout.config import SamplingConfig
from longstraw.rollout.routes import RoutedExperts

FinishReason = Literal["stop", "length"]


class WeightVersionError(RuntimeError):
    """The engine does not hold the weights that were asked for: another version, or none yet."""


@dataclass(frozen=True, kw_only=True)
class PromptRequest:
    """One prompt to answer. token_ids: all of it. weight_version: of the weights that must answer."""

    prompt_id: str
    token_ids: tuple[int, ...]
    weight_version: int


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One response. token_ids: the stop token included, where there is one. logprobs: the sampler's, of each token, at the
    sampling temperature. routes: the experts that its rows went to, where the sampler records them."""

    prompt_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    weight_version: int
    routes: RoutedExperts | None = None


class RolloutEngine(Protocol):
    """Samples groups of responses."""

    @property
    def weight_version(self) -> int | None:
        """Of the weights that it holds; None where it holds none."""

    @property
    def lineage(self) -> str | None:
        """Which weights of that version, as of the last answer (`FolderManifest.lineage`); None where nobody has told it."""

    def generate(
        self, requests: Sequence[PromptRequest], *, group_size: int, sampling: SamplingConfig, seed: int,
        stop_ids: frozenset[int], num_tokens: int | None = None,
    ) -> list[list[Sample]]:
        """`group_size` responses to each request, in the order of the requests.

        seed: with a prompt's id and a response's place in its group it fixes the random numbers of the response. num_tokens:
        ids from here on are not sampled (a model may have more rows than its tokenizer has tokens).
        Raises WeightVersionError where a request names weights that the engine does not hold.
        """
