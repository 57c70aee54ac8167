"""One step of the training program's own objects, on one rank and random prompts: what benchmarks measure.

    opened = open_model(flags)                    # the program's flags, the model
    live = open_update(opened)                    # DDP, optimizer, engine, weight update
    group = live.sample_group(prompt_length=64)   # responses of the policy itself, random rewards
    live.accumulate(1, group)                     # the replay
    metrics = live.take(1, group)                 # sums, checks, moves the weights

Left out: data, tokenizer, reward functions, more than one rank.
"""

from argparse import Namespace
from dataclasses import dataclass

import torch
import torch.distributed as dist

from longstraw.patches.device import cuda_available, current_device
from longstraw.patches.process_groups import ProcessGroupCollection, find_groups, initialize_groups, seed_model_parallel
from longstraw.rollout.resident import decode_group
from longstraw.sweeps import ReplayEngine
from longstraw.transaction.group import PromptGroup
from longstraw.transaction.step import Step
from megatron.grpo.arguments import Machine, parse_arguments
from megatron.grpo.checkpointing import load_weights
from megatron.grpo.logra import build_logra, choose_trained
from megatron.grpo.model_setup import build_training_model, wrap_model
from megatron.grpo.optimizer import build_optimizer, build_scheduler
from megatron.grpo.rollouts import set_advantages
from megatron.grpo.run_config import TrainConfig
from megatron.grpo.train import build_update
from megatron.grpo.weight_update import WeightUpdate


@dataclass(eq=False, kw_only=True)
class OpenedModel:
    """A parsed command line and its model, without gradients or optimizer."""

    args: Namespace
    config: TrainConfig
    groups: ProcessGroupCollection
    model: torch.nn.Module


@dataclass(eq=False, kw_only=True)
class LiveStep:
    """Everything that a step of the program has."""

    opened: OpenedModel
    ddp: torch.nn.Module
    optimizer: object
    step: Step
    update: WeightUpdate

    def sample_group(self, *, prompt_length: int, seed: int = 1, prompt: torch.Tensor | None = None) -> PromptGroup:
        """--group-size responses that the policy samples, and advantages from random rewards; the prompt is `prompt` [1, P],
        or random."""
        config, args = self.opened.config, self.opened.args
        generator = torch.Generator().manual_seed(seed)
        if prompt is None:
            prompt = torch.randint(args.vocab_size, (1, prompt_length), generator=generator)
        prompt = prompt.to(current_device())
        state = self.step.capture(prompt)
        samples = decode_group(
            self.step.engine, prompt, state, group_size=config.objective.group_size, config=config.sampling,
            stop_ids=frozenset(), generator=generator, prompt_id="random",
        )
        rewards = torch.rand(len(samples), generator=generator).tolist()
        group = PromptGroup("random", prompt, samples, rewards=rewards, kept=[True] * len(samples), state=state)
        set_advantages(group, config.objective, mask_truncated=False)
        return group

    def accumulate(self, number: int, group: PromptGroup) -> None:
        """The replay of step `number`, from 1."""
        self.step.states_kept = self.update.states_kept
        with self.update.accumulating(number):
            self.step.replay([group], self.step.count_terms([group]))
        self.step.engine.finish_phase()

    def take(self, number: int, group: PromptGroup) -> dict:
        """The rest of it: the weights move. Returns the step's metrics."""
        metrics = self.update.take(number, [group])
        group.state = None
        return metrics


def open_model(
    flags: str, *, dtype: torch.dtype | None = None, seed: int = 1, checkpoint: str | None = None
) -> OpenedModel:
    """Parse the program's flags (without data) and build the model in this process alone, as its whole world.

    dtype: of the weights, instead of float32; --bf16 is the program's own flag. checkpoint: folder of a saved run whose
    weights the model takes, instead of random ones.
    Raises ValueError as the program does.
    """
    argv = f"--prompt-data none --tokenizer-path none --train-iters 2 --seed {seed} {flags}".split()
    machine = Machine.here()
    args, config = parse_arguments(argv, Machine(cuda=machine.cuda, fused_adam=machine.fused_adam, world_size=1))
    groups = join_world()
    torch.manual_seed(seed)
    seed_model_parallel(seed)
    model = build_training_model(args, groups)
    if checkpoint is not None:
        load_weights(checkpoint, model, groups, vocab_size=args.vocab_size)
    return OpenedModel(args=args, config=config, groups=groups, model=model if dtype is None else model.to(dtype))


def join_world() -> ProcessGroupCollection:
    """The groups of a world of this process alone, joined once."""
    if not dist.is_initialized():
        backend = "nccl" if cuda_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return find_groups() or initialize_groups()


def open_update(opened: OpenedModel) -> LiveStep:
    """DDP, optimizer, engine and weight update around a model, as the program builds them."""
    args, config, groups, model = opened.args, opened.config, opened.groups, opened.model
    if args.optimizer == "logra":
        choose_trained(args, config.logra, model)
    ddp = wrap_model(args, model, groups)
    logra = args.optimizer == "logra"
    optimizer = build_logra(args, config.logra, ddp, groups) if logra else build_optimizer(args, ddp, groups)
    engine = ReplayEngine(
        model, config.sweeps, vocab_size=args.vocab_size, temperature=config.sampling.sampling_temperature
    )
    step = Step(engine, config.objective, dp=groups.dp, responses_together=config.run.responses_per_replay)
    update = build_update(args, config, ddp, optimizer, build_scheduler(args, optimizer), groups, step)
    return LiveStep(opened=opened, ddp=ddp, optimizer=optimizer, step=step, update=update)
