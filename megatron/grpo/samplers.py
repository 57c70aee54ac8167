"""Who answers prompts: this program, from the prompt state that it has captured, or an engine in another process.

Every rank of a model replica (tensor x context parallel) gets the same groups. The resident sampler runs on all of them; of
an engine's clients there is one a replica, on its first rank, and what the engine gives or how it fails is broadcast.

Left out: rewards, filters, and where the data stands (`megatron.grpo.rollouts`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist

from longstraw.rollout.checks import check_samples
from longstraw.rollout.config import SamplingConfig
from longstraw.rollout.protocol import PromptRequest, RolloutEngine, Sample
from longstraw.rollout.resident import decode_group
from longstraw.transaction.group import PromptGroup
from longstraw.transaction.step import Step
from megatron.grpo.prompts import Prompt
from megatron.grpo.random_states import derive_seed
from megatron.grpo.weight_lineage import short


class SamplingFailure(RuntimeError):
    """No groups could be had: every rank of the replica raises it. The message is for whoever runs the job."""


class Sampler(Protocol):
    """Answers prompts."""

    name: str
    """As --rollout-engine names it."""

    def prepare(self, step: int) -> str:
        """Before a step's first prompt, on every rank: have the weights that it trains; a sentence where they cannot be had.
        Nobody samples before all ranks are through."""

    def sample(
        self, prompts: Sequence[Prompt], *, step: int, attempt: int, places: Sequence[int], alone: bool
    ) -> list[PromptGroup]:
        """A group of each prompt, by the weights that step `step` trains.

        places: of the prompts among those of all replicas; with `step` and `attempt` they tell one drawing of a prompt from
        another. alone: the one group is surely the replica's whole share of the step. Collective over the replica; raises
        SamplingFailure on all of it.
        """

    def finish(self) -> None:
        """After the last prompt of an attempt, with or without prompts: collective over replicas that share experts."""


class ResidentSampler:
    """Samples from the captured prompt state.

    num_tokens: of the tokenizer; ids from there on are not sampled. keeps_states: a state may live until the replay.
    record_routes: samples say to which experts their rows went.
    """

    name = "resident"

    def __init__(
        self, step: Step, sampling: SamplingConfig, *, group_size: int, stop_ids: frozenset[int], num_tokens: int, seed: int,
        device: torch.device, keeps_states: bool, record_routes: bool = False,
    ):
        self.step, self.sampling, self.group_size, self.stop_ids = step, sampling, group_size, stop_ids
        self.num_tokens, self.seed, self.device, self.keeps_states = num_tokens, seed, device, keeps_states
        self.record_routes = record_routes

    def prepare(self, step: int) -> str:
        """Nothing: it samples with the trainer's own weights."""
        return ""

    def sample(
        self, prompts: Sequence[Prompt], *, step: int, attempt: int, places: Sequence[int], alone: bool
    ) -> list[PromptGroup]:
        """See `Sampler`."""
        keep = alone and self.keeps_states
        groups = [
            self.answer(prompt, self.group_size, step, attempt, place, keep_state=keep, version=step - 1)
            for prompt, place in zip(prompts, places)
        ]
        return groups

    def answer(self, prompt: Prompt, group_size: int, *draw: object, keep_state: bool, version: int) -> PromptGroup:
        """Capture a prompt and decode `group_size` responses; `draw` names the random numbers (step, attempt, ...)."""
        tokens = torch.tensor([prompt.token_ids], device=self.device)
        state = self.step.capture(tokens, for_replay=keep_state)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, prompt.prompt_id, *draw))
        with self.step.engine.phase("decode"):
            samples = decode_group(
                self.step.engine, tokens, state, group_size=group_size, config=self.sampling, stop_ids=self.stop_ids,
                generator=generator, prompt_id=prompt.prompt_id, weight_version=version, num_tokens=self.num_tokens,
                record_routes=self.record_routes,
            )
        return PromptGroup(prompt.prompt_id, tokens, samples, state=state if keep_state else None)

    def finish(self) -> None:
        """See `Sampler`."""
        self.step.engine.finish_phase()


class EngineSampler:
    """Samples through an engine.

    engine: on the replica's first rank, None on the others. name: as --rollout-engine has it. follow: brings the engine to a
    version of the weights; on one rank of the job, where there is a folder to take them from. wanted: version -> the lineage
    of the weights that are to answer, None where nobody knows; asked where the engine is.
    """

    def __init__(
        self, name: str, engine: RolloutEngine | None, sampling: SamplingConfig, *, group_size: int,
        stop_ids: frozenset[int], num_tokens: int, seed: int, replica: dist.ProcessGroup, device: torch.device,
        follow: Callable[[int], object] | None = None, wanted: Callable[[int], str | None] = lambda version: None,
    ):
        self.name, self.engine, self.sampling, self.group_size = name, engine, sampling, group_size
        self.stop_ids, self.num_tokens, self.seed = stop_ids, num_tokens, seed
        self.replica, self.device, self.follow, self.wanted = replica, device, follow, wanted

    def prepare(self, step: int) -> str:
        """See `Sampler`."""
        if self.follow is None:
            return ""
        wanted = self.wanted(step - 1)
        if self.engine.weight_version == step - 1 and wanted in (None, self.engine.lineage):
            return ""
        try:
            self.follow(step - 1)
        except (OSError, RuntimeError, ValueError) as error:
            return f"--rollout-engine {self.name} cannot have the weights of version {step - 1}: {error}"
        return self._explain_other_weights(step - 1)

    def _explain_other_weights(self, version: int) -> str:
        """One sentence where the engine is known to have had other weights of this version at its last answer; else ""."""
        wanted, held = self.wanted(version), self.engine.lineage
        if None in (wanted, held) or wanted == held:
            return ""
        return (
            f"--rollout-engine {self.name} holds other weights of version {version} than this run's (lineage {short(held)} there "
            f"and {short(wanted)} here): give it those of this run, by --weight-sync and --weight-sync-dir"
        )

    def sample(
        self, prompts: Sequence[Prompt], *, step: int, attempt: int, places: Sequence[int], alone: bool
    ) -> list[PromptGroup]:
        """See `Sampler`."""
        answered: list[list[list[Sample]] | str] = [""]
        if self.replica.rank() == 0 and prompts:
            answered = [self._ask(prompts, step, attempt, places)]
        dist.broadcast_object_list(answered, group_src=0, group=self.replica)
        if not prompts:
            return []
        if isinstance(answered[0], str):
            raise SamplingFailure(answered[0])
        return [
            PromptGroup(prompt.prompt_id, torch.tensor([prompt.token_ids], device=self.device), samples)
            for prompt, samples in zip(prompts, answered[0])
        ]

    def _ask(self, prompts, step: int, attempt: int, places: Sequence[int]) -> list[list[Sample]] | str:
        """The engine's samples under the prompts' own ids, or one sentence."""
        requests = [
            # an engine tells prompts apart by their ids, and one prompt can come twice, at an epoch's end
            PromptRequest(prompt_id=f"{prompt.prompt_id}@{place}", token_ids=prompt.token_ids, weight_version=step - 1)
            for prompt, place in zip(prompts, places)
        ]
        try:
            answers = self.engine.generate(
                requests, group_size=self.group_size, sampling=self.sampling, seed=derive_seed(self.seed, step, attempt),
                stop_ids=self.stop_ids, num_tokens=self.num_tokens,
            )
        except (OSError, RuntimeError, ValueError) as error:  # refused, gone, or talking nonsense
            return f"--rollout-engine {self.name} gave no rollouts for step {step}: {error}"
        problem = self._explain_other_weights(step - 1)
        if problem:
            return problem
        if len(answers) != len(prompts):
            return f"--rollout-engine {self.name} answered {len(answers)} of {len(prompts)} prompts"
        for prompt, samples in zip(prompts, answers):
            problem = check_samples(
                samples, group_size=self.group_size, weight_version=step - 1, stop_ids=self.stop_ids,
                max_response_length=self.sampling.max_response_length, num_tokens=self.num_tokens,
            )
            if problem:
                return f"--rollout-engine {self.name}, prompt {prompt.prompt_id}: {problem}"
        return [
            [replace(sample, prompt_id=prompt.prompt_id) for sample in samples] for prompt, samples in zip(prompts, answers)
        ]

    def finish(self) -> None:
        """Nothing: no model of this program has run."""
