"""One rank's step under a watch: on fake tensors for any world, or for real to measure what the fake one predicts."""

from argparse import Namespace
from contextlib import nullcontext
from dataclasses import dataclass

from longstraw.dry_run.fake_world import fake_world
from longstraw.dry_run.shapes_only import ShapesOnly
from longstraw.dry_run.tracker import MemoryTracker
from longstraw.dry_run.watch import Watch
from longstraw.patches.device import install_cpu_device_layer
from longstraw.patches.gloo_device import share_gloo_device
from longstraw.patches.process_groups import initialize_groups, seed_model_parallel
from megatron.grpo.dry_run.parts import Lengths, build_parts, build_trainer, claim_state
from megatron.grpo.initialize import join_world
from megatron.grpo.run_config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How a step is run.

    ranks, rank: the world, and whose step. every_block: leave no block out. decodes: the responses are sampled by this program.
    """

    ranks: int
    rank: int
    lengths: Lengths
    every_block: bool = False
    decodes: bool = True


def run_fake_step(args: Namespace, config: TrainConfig, settings: RunSettings) -> Watch:
    """The step on fake tensors. Raises ValueError where this process has joined a world already, and UnknownValue where the
    step asks for a number that only data has."""
    args.perform_initialization = False
    with fake_world(ranks=settings.ranks, rank=settings.rank):
        return _run_step(args, config, settings, ShapesOnly())


def run_real_step(args: Namespace, config: TrainConfig, settings: RunSettings) -> Watch:
    """The step itself, on this rank of the world that torchrun describes."""
    install_cpu_device_layer()
    share_gloo_device()
    join_world(args)
    return _run_step(args, config, settings, MemoryTracker())


def _run_step(args: Namespace, config: TrainConfig, settings: RunSettings, tracker: MemoryTracker) -> Watch:
    groups = initialize_groups(
        tensor_parallel=args.tensor_model_parallel_size, context_parallel=args.context_parallel_size,
        expert_parallel=args.expert_model_parallel_size,
    )
    seed_model_parallel(args.seed)
    watch = Watch(tracker)
    share = -(-config.data.prompts_per_step // groups.dp.size())
    with watch.tracker:
        with watch.phase("build"):
            parts = build_parts(args, config, groups, watch, every_block=settings.every_block)
            trainer = build_trainer(parts, settings.lengths, watch, prompts=share, decodes=settings.decodes)
        trainer.run_step(1)
        claim_state(parts, watch)
    return watch
