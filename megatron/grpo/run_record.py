"""The receipts that the program leaves: one for each step that it commits, and one for the run.

    record = RunRecord(args, config, model, groups, recorder, done=done)     # before the first step
    trainer = Trainer(..., describe_step=record.add_step)
    record.finish(trainer, last_step)

Every rank tells what it has seen; rank 0 writes. Left out: what the figures mean (`longstraw.receipts.receipt`).
"""

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from longstraw.exchanges import Exchange, ExchangeCounts
from longstraw.memory_meter import read_peak_bytes
from longstraw.receipts.collect import checksum_tensors, collect_versions, join_checksums, now_utc, summarize_state
from longstraw.receipts.compare import STEP_FOLDER
from longstraw.receipts.memory_timeline import Track
from longstraw.receipts.metrics import read_metrics
from longstraw.receipts.receipt import (
    Check, CollectiveUse, Model, RankMemory, Receipt, ResidentState, Results, Staleness, Tokens, Topology, write_receipt,
)
from longstraw.receipts.recorder import RunRecorder
from megatron.grpo.group_names import name_groups
from megatron.grpo.receipt_settings import describe_objective, describe_update
from megatron.grpo.rollout_record import describe_rollouts
from megatron.grpo.run_config import TrainConfig
from megatron.grpo.sharding import is_expert, partition_dim

PHASE_TOKENS = {
    "capture": ("prompt_tokens",), "decode": ("response_tokens",), "score": ("response_tokens",),
    "responses": ("response_tokens",), "prompt_reverse": ("prompt_tokens",),
}
"""Phase -> the tokens of a step that it runs through the model."""


@dataclass(frozen=True, kw_only=True)
class Covered:
    """What a receipt covers, one step or all of this run, as this rank has seen it.

    weights: checksums before and after. counts: of `trainer.TokenCounts`. peak_bytes: of this process. records: of metrics.
    rollout_lag: in steps.
    """

    first: int
    last: int
    started: str
    weights: tuple[str, str]
    counts: dict[str, int]
    state: tuple[ResidentState, ...]
    peak_bytes: int
    seconds: dict[str, float]
    processor_seconds: dict[str, float]
    records: list[dict]
    exchanged: dict[tuple[str, str], Exchange]
    track: Track
    rollout_lag: int


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """What rank 0 needs of each rank."""

    counts: dict[str, int]
    state: tuple[ResidentState, ...]
    peak_bytes: int
    phases: dict[str, int]
    categories: dict[str, int]
    host_categories: dict[str, int]
    rollout_lag: int


class RunRecord:
    """Facts of a run, and what was known when the last receipt was written.

    done: the last step before this run's first.
    """

    def __init__(self, args: Namespace, config: TrainConfig, model, groups, recorder: RunRecorder, *, done: int):
        self.args, self.config, self.model, self.groups, self.recorder = args, config, model, groups, recorder
        self.first_step = done + 1
        self.started = self.step_started = now_utc()
        self.initial_weights = self.step_weights = checksum_weights(model)
        self.seconds: dict[str, float] = {}
        self.processor_seconds: dict[str, float] = {}
        self.counts = dict.fromkeys(("prompts", "responses", "prompt_tokens", "response_tokens", "loss_tokens"), 0)
        self.state: tuple[ResidentState, ...] = ()  # of this rank, at the run's fullest moment
        self.exchanges = ExchangeCounts(name_groups(groups))  # of this rank; whoever runs the steps has it watch them
        self.exchanged: dict[tuple[str, str], Exchange] = {}
        self.peak_bytes = self.rollout_lag = 0
        if dist.get_rank() == 0:
            _forget_steps_after(Path(args.output_dir), done)

    def add_step(self, number: int, metrics: dict, trainer) -> None:
        """Write receipts/step-NNNNNN.json of a committed step. Collective."""
        state = summarize_state(dist.get_rank(), trainer.step.fullest_state)
        trainer.step.fullest_state = []
        if sum(item.bytes for item in state) >= sum(item.bytes for item in self.state):
            self.state = state
        peak = read_peak_bytes()
        self.peak_bytes = max(self.peak_bytes, peak)
        self.rollout_lag = max(self.rollout_lag, trainer.rollout_lag)
        clock = self.recorder.clock
        seconds, self.seconds = take_seconds(clock.seconds, self.seconds)
        processor, self.processor_seconds = take_seconds(clock.processor_seconds, self.processor_seconds)
        exchanged, self.exchanged = take_exchanges(self.exchanges, self.exchanged)
        own, counts = self._own_counts(trainer), self.counts
        fresh = {name: value - counts[name] for name, value in own.items()}
        self.counts = own
        weights = checksum_weights(self.model) if self.config.run.weights_checksum == "step" else self.step_weights
        receipt = self._build(trainer, Covered(
            first=number, last=number, started=self.step_started, weights=(self.step_weights, weights), counts=fresh,
            state=state, peak_bytes=peak, seconds=seconds, processor_seconds=processor, records=[metrics],
            exchanged=exchanged, track=self.recorder.timeline.take_step(), rollout_lag=trainer.rollout_lag,
        ))
        self.step_started, self.step_weights = now_utc(), weights
        if receipt is not None:
            write_receipt(Path(self.args.output_dir) / STEP_FOLDER / f"step-{number:06d}.json", receipt)

    def finish(self, trainer, last_step: int) -> None:
        """Write receipt.json, draw the run and print the closing table. Collective."""
        records = read_metrics(self.recorder.metrics.path) if dist.get_rank() == 0 else []
        receipt = self._build(trainer, Covered(
            first=self.first_step, last=last_step, started=self.started,
            weights=(self.initial_weights, checksum_weights(self.model)), counts=self._own_counts(trainer), state=self.state,
            peak_bytes=max(self.peak_bytes, read_peak_bytes()), seconds=dict(self.recorder.clock.seconds),
            processor_seconds=dict(self.recorder.clock.processor_seconds), records=records,
            exchanged=self.exchanges.totals, track=self.recorder.timeline.whole, rollout_lag=self.rollout_lag,
        ))
        if receipt is not None:
            size, group = self.groups.cp.size(), self.config.objective.group_size
            title = f"{self.args.model_preset}, {self.config.sweeps.semantics}, CP {size}, G {group}"
            self.recorder.finish(receipt, title=title)

    def _build(self, trainer, covered: Covered) -> Receipt | None:
        """The receipt, on rank 0. Collective."""
        shares: list[RankShare] = [None] * dist.get_world_size()
        dist.all_gather_object(shares, RankShare(
            counts=covered.counts, state=covered.state, phases=covered.track.peaks,
            peak_bytes=max([covered.peak_bytes, *covered.track.peaks.values()]),  # the kernel's own peak may lag behind
            categories=count_resident_bytes(trainer, covered.state), host_categories=count_host_bytes(trainer, covered.state),
            rollout_lag=covered.rollout_lag,
        ))
        if dist.get_rank() != 0:
            return None
        args, config, records, seconds = self.args, self.config, covered.records, covered.seconds
        metrics, evaluations = records[-1] if records else {}, _evaluations(records)
        totals = {name: sum(share.counts[name] for share in shares) for name in covered.counts}
        ran = {phase: sum(totals[name] for name in names) for phase, names in PHASE_TOKENS.items() if phase in seconds}
        return Receipt(
            command=("megatron.grpo.train", *sys.argv[1:]), seed=args.seed, started=covered.started, finished=now_utc(),
            semantics=config.sweeps.semantics,
            staleness=Staleness(rollout_lag_steps=max(share.rollout_lag for share in shares)),
            versions=collect_versions(), topology=describe_topology(args, self.groups),
            model=Model(
                preset=args.model_preset, parameters=count_parameters(self.model, self.groups),
                dtype=str(next(self.model.parameters()).dtype).removeprefix("torch."), initial_weights=covered.weights[0],
                final_weights=covered.weights[1],
            ),
            objective=describe_objective(args, config), update=describe_update(args, config),
            rollout=describe_rollouts(config, trainer.rollouts, records, covered.first), tokens=Tokens(**totals),
            state=tuple(item for share in shares for item in share.state),
            memory=tuple(
                RankMemory(
                    rank=rank, peak_bytes=share.peak_bytes, categories=share.categories, phases=share.phases,
                    counted="allocator" if torch.cuda.is_available() else "process",
                    host_bytes=sum(share.host_categories.values()), host_categories=share.host_categories,
                )
                for rank, share in enumerate(shares)
            ),
            seconds=seconds, processor_seconds=covered.processor_seconds,
            phase_tokens={phase: tokens for phase, tokens in ran.items() if tokens},
            memory_over_time=tuple(covered.track.moments), collectives=describe_exchanges(covered.exchanged),
            metrics=metrics,
            results=Results(
                first_step=covered.first, last_step=covered.last,
                first_eval_reward_mean=evaluations[0] if evaluations else None,
                last_eval_reward_mean=evaluations[-1] if evaluations else None,
            ),
            checks=check_metrics(metrics),
        )

    def _own_counts(self, trainer) -> dict[str, int]:
        """What this replica has trained on, on one rank of it."""
        counts = trainer.counts if trainer.scorer.replica.rank() == 0 else type(trainer.counts)()
        return dict(vars(counts))


def check_metrics(metrics: dict) -> tuple[Check, ...]:
    """What a step was held to before it was committed, with what was measured.

    The first ratio is 1, bit for bit, wherever the old log-probabilities are those of the replay itself.
    """
    checks = []
    if "nan_logprobs" in metrics:
        count = metrics["nan_logprobs"]
        checks.append(Check(name="NaN log-probabilities", passed=count == 0, value=float(count), bound=0.0))
    if "grad_norm" in metrics:
        norm = float(metrics["grad_norm"])
        checks.append(Check(name="gradient is finite", passed=norm < float("inf"), value=norm))
    if metrics.get("ratio_max"):
        largest = float(metrics["ratio_max"])
        checks.append(Check(name="first ratio is 1", passed=largest == 1.0, value=largest, bound=1.0))
    if "step_refused" in metrics:
        refused = float(metrics["step_refused"])
        checks.append(Check(name="predicted KL is finite", passed=not refused, value=refused, bound=0.0))
    return tuple(checks)


def describe_topology(args: Namespace, groups) -> Topology:
    """The layout of this world."""
    return Topology(
        world_size=dist.get_world_size(), tensor_model_parallel_size=groups.tp.size(),
        context_parallel_size=groups.cp.size(), data_parallel_size=groups.dp.size(),
        expert_model_parallel_size=groups.ep.size(), sequence_parallel=args.sequence_parallel, backend=dist.get_backend(),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    )


def checksum_weights(model) -> str:
    """One checksum over every rank's weights, equal on every rank. Collective."""
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, checksum_tensors((n, p.data) for n, p in model.named_parameters()))
    return join_checksums(gathered)


def count_resident_bytes(trainer, state: Sequence[ResidentState]) -> dict[str, int]:
    """Bytes of this rank by category (`longstraw.memory_scopes`): what is always there, and the ledger's state at its fullest."""
    categories = {"weights": sum(p.numel() * p.element_size() for p in trainer.step.engine.model.parameters())}
    categories |= trainer.update.count_bytes()
    return categories | count_state_bytes(state, "device")  # the peak is the device's


def count_host_bytes(trainer, state: Sequence[ResidentState]) -> dict[str, int]:
    """What this rank keeps in host memory on purpose, by category."""
    reference = trainer.step.reference
    return count_state_bytes(state, "host") | ({} if reference is None else {"reference": reference.count_bytes()})


def count_state_bytes(state: Sequence[ResidentState], residency: str) -> dict[str, int]:
    """Bytes by category of the state that lies there."""
    found: Counter[str] = Counter()
    for item in state:
        if item.residency == residency:
            found[state_class(item.kind)] += item.bytes
    return dict(found)


def state_class(kind: str) -> str:
    """The category of a class of the prompt's state, as the ledger names it."""
    return "staging" if kind.startswith("staged") else "adjoints" if kind.endswith("_adjoint") else "prompt_state"


def take_seconds(now: dict[str, float], before: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """What phases have taken since `before`, and what they have up to now."""
    fresh = {name: value - before.get(name, 0.0) for name, value in now.items()}
    return {name: value for name, value in fresh.items() if value > 0.0}, dict(now)


def take_exchanges(
    counts: ExchangeCounts, before: dict[tuple[str, str], Exchange]
) -> tuple[dict[tuple[str, str], Exchange], dict[tuple[str, str], Exchange]]:
    """What has been exchanged since `before`, and what has been up to now."""
    now = {key: replace(total) for key, total in counts.totals.items()}
    earlier = {key: before.get(key, Exchange()) for key in now}
    fresh = {key: Exchange(now[key].calls - one.calls, now[key].bytes - one.bytes) for key, one in earlier.items()}
    return {key: one for key, one in fresh.items() if one.calls}, now


def describe_exchanges(exchanged: dict[tuple[str, str], Exchange]) -> tuple[CollectiveUse, ...]:
    """As a receipt has them."""
    return tuple(
        CollectiveUse(group=group, operation=operation, calls=round(use.calls), bytes=round(use.bytes))
        for (group, operation), use in sorted(exchanged.items())
    )


def count_parameters(model, groups) -> int:
    """Parameters of the whole model: shards of tensor parallelism and all ranks' experts added up, replicated ones once."""
    tp, ep, total = groups.tp.size(), groups.ep.size(), 0
    for name, parameter in model.named_parameters():
        copies = ep if is_expert(name) else 1 if partition_dim(name) is None else tp
        total += parameter.numel() * copies
    return total


def _evaluations(records: Sequence[dict]) -> list[float]:
    """Held-out rewards in order, the one from before the first step first."""
    found = [record["eval_reward_mean"] for record in records if record.get("eval_reward_mean") is not None]
    before = records[0].get("eval_reward_mean_before") if records else None
    return found if before is None else [before, *found]


def _forget_steps_after(folder: Path, done: int) -> None:
    """Remove the receipts of steps that this run takes anew, and what an earlier run here has left at its end."""
    for name in ("receipt.json", "run.png"):
        (folder / name).unlink(missing_ok=True)
    for path in (folder / STEP_FOLDER).glob("step-*.json"):
        if int(path.stem.removeprefix("step-")) > done:
            path.unlink()
