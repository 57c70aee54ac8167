"""One rank's step under a watch: on fake tensors for any world, or for real to measure what the fake one predicts."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from unittest import mock

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import common, gdn

from longstraw.dry_run.counter import GroupSpan, OperationCounter
from longstraw.dry_run.even_choices import even_choices
from longstraw.dry_run.fake_world import fake_world
from longstraw.dry_run.fused_ops import fused_delta_rule, fused_l2norm
from longstraw.dry_run.kernels import gpu_kernels
from longstraw.dry_run.shapes_only import ShapesOnly
from longstraw.dry_run.tracker import MemoryTracker
from longstraw.dry_run.watch import Watch
from longstraw.exchanges import watch_exchanges
from longstraw.patches.device import install_cpu_device_layer
from longstraw.patches.gloo_device import share_gloo_device
from longstraw.patches.process_groups import initialize_groups, seed_model_parallel
from megatron.grpo import model_setup
from megatron.grpo.dry_run.parts import Lengths, build_parts, build_trainer, claim_state
from megatron.grpo.dry_run.receipt import StepFacts, gather_facts
from megatron.grpo.group_names import list_ranks, name_groups
from megatron.grpo.initialize import join_world
from megatron.grpo.run_config import TrainConfig

RANKS_OF_A_NODE = 8


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How a step is run.

    ranks, rank: the world, and whose step. gpu: with a GPU's kernels (a step that is measured has its machine's own).
    every_block: leave no block out. decodes: the responses are sampled by this program. even_choices: of a step that is measured,
    as those of a dry run always are.
    """

    ranks: int
    rank: int
    lengths: Lengths
    gpu: bool = True
    every_block: bool = False
    decodes: bool = True
    even_choices: bool = False


@dataclass(frozen=True)
class RanStep:
    """A step that has run: what was watched, and what a receipt says beside it."""

    watch: Watch
    facts: StepFacts


def run_fake_step(args: Namespace, config: TrainConfig, settings: RunSettings) -> RanStep:
    """The step on fake tensors. Raises ValueError where this process has joined a world already, and UnknownValue where the
    step asks for a number that only data has."""
    args.perform_initialization, tracker = False, ShapesOnly()
    with ExitStack() as stack:
        stack.enter_context(fake_world(ranks=settings.ranks, rank=settings.rank))
        stack.enter_context(even_choices(tracker))
        if settings.gpu:
            install_cpu_device_layer()
            stack.enter_context(gpu_kernels(tracker))
            stack.enter_context(gpu_model(tracker))
        return _run_step(args, config, settings, tracker)


def run_real_step(args: Namespace, config: TrainConfig, settings: RunSettings) -> RanStep:
    """The step itself, on this rank of the world that torchrun describes."""
    install_cpu_device_layer()
    share_gloo_device()
    join_world(args)
    tracker = MemoryTracker()
    with even_choices(tracker) if settings.even_choices else nullcontext():
        return _run_step(args, config, settings, tracker)


@contextmanager
def gpu_model(tracker: MemoryTracker) -> Iterator[None]:
    """A block in which models are built as for a GPU: with flash-linear-attention's kernels."""
    delta_rule = fused_delta_rule(tracker.hold_for_a_moment)
    with ExitStack() as stack:
        for target, name, stand_in in (
            (model_setup, "cuda_available", lambda: True), (common, "l2norm", fused_l2norm),
            (common, "chunk_gated_delta_rule", delta_rule), (gdn, "chunk_gated_delta_rule", delta_rule),
        ):
            stack.enter_context(mock.patch.object(target, name, stand_in))
        yield


def name_spans(groups: ProcessGroupCollection) -> Callable[[object], tuple[str, GroupSpan]]:
    """A process group -> what it is called, and its span."""
    name_of = name_groups(groups)

    def name_span(group) -> tuple[str, GroupSpan]:
        ranks = list_ranks(group)
        return name_of(group), GroupSpan(len(ranks), len({rank // RANKS_OF_A_NODE for rank in ranks}))

    return name_span


def _run_step(args: Namespace, config: TrainConfig, settings: RunSettings, tracker: MemoryTracker) -> RanStep:
    groups = initialize_groups(
        tensor_parallel=args.tensor_model_parallel_size, context_parallel=args.context_parallel_size,
        expert_parallel=args.expert_model_parallel_size,
    )
    seed_model_parallel(args.seed)
    tracker.counter = OperationCounter(name_spans(groups))
    watch = Watch(tracker)
    share = -(-config.data.prompts_per_step // groups.dp.size())
    with watch.tracker, watch_exchanges(tracker.counter.see_exchange):
        with watch.phase("build"):
            parts = build_parts(args, config, groups, watch, every_block=settings.every_block)
            trainer = build_trainer(parts, settings.lengths, watch, prompts=share, decodes=settings.decodes)
        metrics = trainer.run_step(1)
        claim_state(parts, watch)
    return RanStep(watch, gather_facts(args, groups, trainer, metrics))
