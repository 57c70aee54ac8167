"""The receipt of a step that a dry run foresaw, or that was measured to be compared with one: the schema of a run's.

A dry run has one rank's memory and collectives, and seconds where it estimates them; no weights, and so no checksums, metrics
or checks. Memory counts tensors alone, in the dry run and where it is measured (`counted`).
"""

import sys
from argparse import Namespace
from dataclasses import dataclass, replace

import torch.distributed as dist

from longstraw.dry_run.hardware import HARDWARE
from longstraw.dry_run.report import describe_collectives, describe_memory
from longstraw.dry_run.time_model import estimate_times
from longstraw.dry_run.watch import Watch
from longstraw.receipts.collect import collect_versions, now_utc, summarize_state
from longstraw.receipts.receipt import (
    CollectiveUse, MemoryMoment, Model, RankMemory, Receipt, ResidentState, Results, Tokens, Topology,
)
from megatron.grpo.receipt_settings import describe_objective, describe_responses, describe_update
from megatron.grpo.run_config import TrainConfig
from megatron.grpo.run_record import PHASE_TOKENS, check_metrics, count_parameters, describe_topology
from megatron.grpo.trainer import Trainer

NO_WEIGHTS = "not taken"
"""In the place of a checksum: weights that a dry run does not draw, or that nobody loaded."""


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """What a receipt says of one rank's step that its watch has not seen. tokens: of this replica, on one rank of it."""

    topology: Topology
    parameters: int
    dtype: str
    tokens: dict[str, int]
    state: tuple[ResidentState, ...]
    metrics: dict


def gather_facts(args: Namespace, groups, trainer: Trainer, metrics: dict) -> StepFacts:
    """Of a step that has run, while its world is there."""
    model = trainer.step.engine.model
    return StepFacts(
        topology=describe_topology(args, groups), parameters=count_parameters(model, groups),
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        tokens=dict(vars(trainer.counts)), state=summarize_state(dist.get_rank(), trainer.step.fullest_state), metrics=metrics,
    )


def build_receipt(
    args: Namespace, config: TrainConfig, watch: Watch, facts: StepFacts, *, started: str, rank: int, measured: bool,
    decodes: bool, hardware: str | None,
) -> Receipt | None:
    """The receipt, on every rank that foresees, or on rank 0 of those that measured.

    hardware: whose seconds are estimated, if any. Collective where it is measured.
    """
    shares: list = [(rank, describe_memory(watch.tracker), facts.state)]
    if measured:
        shares = [None] * dist.get_world_size()
        dist.all_gather_object(shares, (dist.get_rank(), describe_memory(watch.tracker), facts.state))
        if dist.get_rank() != 0:
            return None
    times = {} if hardware is None else estimate_times(watch.counter, HARDWARE[hardware])
    seconds = {name: time.estimate for name, time in times.items() if name != "outside"}
    topology, replicas, prompts = facts.topology, facts.topology.data_parallel_size, config.data.prompts_per_step
    tokens = {name: number * replicas for name, number in facts.tokens.items()}
    if not measured:  # this replica may have one prompt more than others; all are alike
        tokens = {name: number * prompts // facts.tokens["prompts"] for name, number in facts.tokens.items()}
    if hardware is not None:
        topology = replace(topology, device=hardware)
    phases = [name for name in watch.tracker.phases if name in PHASE_TOKENS]
    return Receipt(
        source="run" if measured else "dry_run", command=("dry_run", *sys.argv[1:]), seed=args.seed, started=started,
        finished=now_utc(), semantics=config.sweeps.semantics, versions=collect_versions(), topology=topology,
        model=Model(
            preset=args.model_preset, parameters=facts.parameters, dtype=facts.dtype, initial_weights=NO_WEIGHTS,
            final_weights=NO_WEIGHTS,
        ),
        objective=describe_objective(args, config), update=describe_update(args, config),
        rollout={"source": "resident" if decodes else "elsewhere"} | describe_responses(config), tokens=Tokens(**tokens),
        state=tuple(item for _, _, state in shares for item in state),
        memory=tuple(describe_rank(number, held) for number, held, _ in shares), seconds=seconds,
        phase_tokens={name: sum(tokens[kind] for kind in PHASE_TOKENS[name]) for name in phases},
        memory_over_time=place_peaks(shares[0][1]["phases"], seconds),
        collectives=tuple(
            CollectiveUse(group=group, operation=operation, **use)
            for group, operations in describe_collectives(watch.counter, without="build").items()
            for operation, use in operations.items()
        ),
        metrics=facts.metrics if measured else {},
        results=Results(first_step=1, last_step=1, first_eval_reward_mean=None, last_eval_reward_mean=None),
        checks=check_metrics(facts.metrics) if measured else (),
    )


def describe_rank(rank: int, held: dict) -> RankMemory:
    """A rank's memory, from `longstraw.dry_run.report.describe_memory`."""
    return RankMemory(
        rank=rank, peak_bytes=held["peak_bytes"]["device"], categories=held["categories"]["device"], counted="tensors",
        host_bytes=held["peak_bytes"]["host"], host_categories=held["categories"]["host"],
        phases={name: places["device"]["bytes"] for name, places in held["phases"].items()},
    )


def place_peaks(phases: dict, seconds: dict[str, float]) -> tuple[MemoryMoment, ...]:
    """The device's peak of each phase at the middle of its seconds, the phases in the order in which they began."""
    moments, passed = [], 0.0
    for name, places in phases.items():
        if name in seconds:
            size = places["device"]["bytes"]
            moments.append(MemoryMoment(seconds=passed + seconds[name] / 2, phase=name, bytes=size))
            passed += seconds[name]
    return tuple(moments)
