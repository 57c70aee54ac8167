"""The parts of a training step around the model, for a step without data: prompts and responses of given lengths, no rewards,
no terminal. The model, its optimizer, the engine's sweeps and the trainer are the training program's own.
"""

from argparse import Namespace
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist

from longstraw.adapters.decoder import last_token_logits
from longstraw.dry_run.sampling import SampledEngine, shape_of
from longstraw.dry_run.watch import Watch
from longstraw.memory_scopes import memory_scope
from longstraw.objectives.advantages import RewardBaseline
from longstraw.patches.device import current_device
from longstraw.patches.process_groups import ProcessGroupCollection
from longstraw.rollout.protocol import Sample
from longstraw.rollout.sampling import sample_tokens
from longstraw.segments import Segment, SegmentState
from longstraw.transaction.group import PromptGroup
from longstraw.transaction.reference import ReferencePolicy
from longstraw.transaction.step import Step
from megatron.grpo.logra import build_logra, choose_trained
from megatron.grpo.model_setup import build_training_model, wrap_model
from megatron.grpo.optimizer import build_optimizer, build_scheduler, optimizer_state
from megatron.grpo.prompt_order import PromptOrder
from megatron.grpo.run_config import TrainConfig
from megatron.grpo.samplers import ResidentSampler
from megatron.grpo.stop_signal import StopSignal
from megatron.grpo.train import build_update
from megatron.grpo.trainer import Trainer
from megatron.grpo.weight_update import WeightUpdate


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of each prompt and of each response."""

    prompt: int
    response: int


@dataclass(eq=False, kw_only=True)
class StepParts:
    """A model with everything that moves it."""

    args: Namespace
    config: TrainConfig
    groups: ProcessGroupCollection
    model: torch.nn.Module
    ddp: torch.nn.Module
    optimizer: object
    step: Step
    update: WeightUpdate


def build_parts(args: Namespace, config: TrainConfig, groups: ProcessGroupCollection, watch: Watch, *, every_block: bool):
    """What the training program builds, in its order; each is named to the tracker."""
    claim = watch.tracker.claim
    model = build_training_model(args, groups)
    claim([*model.parameters(), *model.buffers()], "weights")
    if args.optimizer == "logra":
        choose_trained(args, config.logra, model)
    ddp = wrap_model(args, model, groups)
    logra = args.optimizer == "logra"
    optimizer = build_logra(args, config.logra, ddp, groups) if logra else build_optimizer(args, ddp, groups)
    engine = SampledEngine(
        model, config.sweeps, vocab_size=args.vocab_size, temperature=config.sampling.sampling_temperature, watch=watch,
        every_block=every_block,
    )
    reference = ReferencePolicy(model) if config.objective.kl_coefficient else None
    step = Step(
        engine, config.objective, dp=groups.dp, responses_together=config.run.responses_per_replay, reference=reference
    )
    update = build_update(args, config, ddp, optimizer, build_scheduler(args, optimizer), groups, step)
    parts = StepParts(
        args=args, config=config, groups=groups, model=model, ddp=ddp, optimizer=optimizer, step=step, update=update
    )
    claim_state(parts, watch)
    return parts


def claim_state(parts: StepParts, watch: Watch) -> None:
    """Name what gradients and the optimizer hold."""
    claim, own = watch.tracker.claim, {id(p) for p in parts.model.parameters()}
    claim([buffer.grad_data for buffer in parts.ddp.buffers + parts.ddp.expert_parallel_buffers], "gradients")
    adam = parts.optimizer
    if parts.args.optimizer == "logra":
        claim(parts.optimizer.logra.buffers.values(), "gradients")
        for weight in parts.optimizer.logra.weights:
            kept = [weight.moment, *(weight.moments or ()), *([] if weight.masters is None else [weight.masters.rows])]
            claim([tensor for tensor in kept if tensor is not None], "optimizer")
        adam = parts.optimizer.rest
    if adam is not None:
        for weight, state in optimizer_state(adam).items():
            claim([value for value in state.values() if torch.is_tensor(value)], "optimizer")
            if id(weight) not in own:
                claim([weight], "optimizer")


class NoRewards:
    """Stands for the scorer of rewards: nothing has failed."""

    def __init__(self, replica: dist.ProcessGroup):
        self.replica, self.statuses, self.first_failure = replica, Counter(), ""

    def forget_failures(self) -> None:
        """There are none."""


class PhaseRecorder:
    """Stands for the run's recorder and terminal: tells a watch of the trainer's phases."""

    def __init__(self, watch: Watch):
        self.clock, self.console, self.phase = self, self, watch.phase

    def say(self, text: str) -> None:
        """To nobody."""


class RandomRollouts:
    """Groups whose prompts and responses have the same lengths; a half of the responses is rewarded.

    decodes: responses are sampled here, from the captured state, as --rollout-engine resident does.
    """

    name = "resident"

    def __init__(
        self, step: Step, config: TrainConfig, lengths: Lengths, watch: Watch, *, prompts: int, decodes: bool
    ):
        self.step, self.config, self.lengths, self.watch = step, config, lengths, watch
        self.prompts, self.decodes = prompts, decodes
        self.keeps_states = prompts == 1 and step.reference is None and config.objective.group_filter == "none"

    def collect(self, number: int) -> list[PromptGroup]:
        """See `megatron.grpo.rollouts.RolloutSource`."""
        return [self._make_group(f"prompt{index}") for index in range(self.prompts)]

    def _make_group(self, name: str) -> PromptGroup:
        size, length, state = self.config.objective.group_size, self.lengths.response, None
        with memory_scope("buffers"):
            prompt = torch.ones(1, self.lengths.prompt, dtype=torch.int64, device=current_device())
        if self.decodes:
            state = self.step.capture(prompt, for_replay=self.keeps_states)
            with self.watch.phase("decode"):
                self._decode(prompt, state)
        sample = Sample(
            prompt_id=name, token_ids=(1,) * length, logprobs=(-1.0,) * length, finish_reason="stop", weight_version=0
        )
        return PromptGroup(
            name, prompt, [sample] * size, rewards=[float(i % 2) for i in range(size)], scored=[True] * size,
            kept=[True] * size, state=state if self.keeps_states else None,
        )

    @torch.no_grad()
    def _decode(self, prompt: torch.Tensor, state: SegmentState) -> None:
        """As `longstraw.rollout.resident.decode_group`, at the positions that the engine would run."""
        engine, size, generator = self.step.engine, self.config.objective.group_size, torch.Generator().manual_seed(1)
        with memory_scope("buffers"):
            inputs = prompt.new_ones(size, self.lengths.response)
        segment = Segment("rollout", inputs, block_size=1)
        decoding, left = engine.open_segment(segment, state), {}
        chosen = engine.choose_blocks(decoding, len(decoding.plan))
        for position in range(len(decoding.plan)):
            shape = shape_of(decoding, position)
            if position not in chosen:
                if position + 1 in chosen:  # the last one runs
                    with self.watch.standing_for(0.0):
                        engine.stand_in_and_forget(left[shape], decoding, before + 1, position)
                continue
            before = position
            with self.watch.standing_for(chosen[position]):
                hidden, left[shape] = engine.pass_block(segment, decoding, position)
                engine.forget_block(decoding, position)
                with memory_scope("logits"):
                    logits = last_token_logits(engine.model, hidden, decoding.plan[position], engine.vocab_size)
                    sample_tokens(logits, self.config.sampling, generator)


def build_trainer(parts: StepParts, lengths: Lengths, watch: Watch, *, prompts: int, decodes: bool) -> Trainer:
    """The training program's trainer over these parts.

    prompts: of this replica in one step.
    """
    args, config, groups, step = parts.args, parts.config, parts.groups, parts.step
    sampler = ResidentSampler(
        step, config.sampling, group_size=config.objective.group_size, stop_ids=frozenset(), num_tokens=args.vocab_size,
        seed=args.seed, device=current_device(), keeps_states=False,
    )
    return Trainer(
        args=args, config=config, groups=groups, update=parts.update, step=step,
        rollouts=RandomRollouts(step, config, lengths, watch, prompts=prompts, decodes=decodes),
        scorer=NoRewards(groups.tp_cp), sampler=sampler, eval_prompts=[],
        order=PromptOrder(1, seed=1, shuffle=False, fingerprint=""), recorder=PhaseRecorder(watch),
        stop=StopSignal(current_device(), signals=()), save=lambda number: None,
        describe_step=lambda number, metrics, trainer: None, baseline=RewardBaseline(),
    )
