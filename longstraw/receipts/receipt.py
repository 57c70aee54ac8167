"""A receipt: what a run, or one step of it, did and how, complete enough to compare with another or to be doubted in detail.

A run leaves receipts/step-NNNNNN.json for each step that it commits and receipt.json for all of them; `tools/dry_run.py`
writes the receipt of a step that it only foresees. All have one JSON Schema, receipt.schema.json beside this file.

A receipt states facts that were measured, configured or (`source` "dry_run") foreseen; it never judges.
`longstraw.receipts.collect` gathers what goes in. Left out: anything about a machine but its device.
"""

import dataclasses
import json
import math
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from longstraw.receipts.schema import build_schema, validate

SCHEMA_VERSION = 3

Scalar = str | bool | int | float | None


def _check_counts(record: Any, *, signed: tuple[str, ...] = ()) -> None:
    """Holds every int and float field of a record, and the values of its dicts of numbers, to finite and >= 0; those of the
    fields in `signed` to finite."""
    for name, value in dataclasses.asdict(record).items():
        for key, number in value.items() if isinstance(value, dict) else [(None, value)]:
            if isinstance(number, (int, float)) and not isinstance(number, bool):
                if not math.isfinite(number) or (number < 0 and name not in signed):
                    where = f"{name}[{key!r}]" if key is not None else name
                    wanted = "finite" if name in signed else "0 or more"
                    raise ValueError(f"receipt: {type(record).__name__}.{where} is {number}; it must be {wanted}")


@dataclass(frozen=True, kw_only=True)
class Versions:
    """The software that ran."""

    longstraw: str
    """Version of this project."""
    torch: str
    """Version of PyTorch, with its build tag."""
    megatron_core: str
    """Version of megatron-core."""
    python: str
    """Version of Python."""
    others: dict[str, str]
    """Version of each optional package that was importable: kernels, engines, transformers."""


@dataclass(frozen=True, kw_only=True)
class Staleness:
    """How old the things were that a step's gradient was taken at; all zero under `exact`."""

    policy: Literal["recapture", "reuse"] = "recapture"
    """recapture: a prompt's state is made anew at the weights of each step; reuse: it may be older (stale_prefix)."""
    prefix_age_steps: int = 0
    """Largest number of optimizer steps between a prompt state's capture and its use."""
    rollout_lag_steps: int = 0
    """Largest number of optimizer steps between the weights that sampled a response and those trained on it."""

    def __post_init__(self) -> None:
        _check_counts(self)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """How the work was laid out over ranks."""

    world_size: int
    """Number of ranks."""
    tensor_model_parallel_size: int
    """Ranks that share each matrix."""
    context_parallel_size: int
    """Ranks that share each chunk of tokens."""
    data_parallel_size: int
    """Ranks, or groups of them, that take different prompts."""
    expert_model_parallel_size: int = 1
    """Ranks that share the experts."""
    sequence_parallel: bool = False
    """Whether tensor-parallel ranks also split the tokens between matrices."""
    backend: str
    """Of torch.distributed: gloo or nccl."""
    device: str
    """Name of the device of rank 0; of a dry run, the GPU whose seconds are estimated."""

    def __post_init__(self) -> None:
        product = self.tensor_model_parallel_size * self.context_parallel_size * self.data_parallel_size
        if min(product, self.expert_model_parallel_size) < 1 or product != self.world_size:
            raise ValueError(f"receipt: tensor {self.tensor_model_parallel_size} x context {self.context_parallel_size} x "
                             f"data {self.data_parallel_size} parallel is not the world size {self.world_size}")


@dataclass(frozen=True, kw_only=True)
class Model:
    """What was trained."""

    preset: str
    """Name of the model preset, or of the converted checkpoint."""
    parameters: int
    """Number of parameters, over all ranks."""
    dtype: str
    """Of the weights that the forward pass uses."""
    initial_weights: str
    """Checksum of the weights before the first step; see `longstraw.receipts.collect.checksum_tensors`."""
    final_weights: str
    """Checksum of the weights after the last step."""

    def __post_init__(self) -> None:
        _check_counts(self)


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Tokens of the whole run, each counted once however often it was recomputed."""

    prompts: int
    """Prompts trained on."""
    responses: int
    """Responses trained on."""
    prompt_tokens: int
    """Tokens of those prompts, each prompt counted once for its group."""
    response_tokens: int
    """Tokens of those responses."""
    loss_tokens: int
    """Response tokens that the loss counted: those not masked."""

    def __post_init__(self) -> None:
        _check_counts(self)
        if self.loss_tokens > self.response_tokens:
            raise ValueError(f"receipt: {self.loss_tokens} loss tokens are more than {self.response_tokens} response tokens")


@dataclass(frozen=True, kw_only=True)
class ResidentState:
    """State of one class on one rank, at the step's fullest moment."""

    rank: int
    """Global rank that holds it."""
    owner: int
    """Context-parallel rank that owns it."""
    kind: str
    """Class of state as the ledger names it: kv_pages, kv_adjoint, recurrent_state and so on."""
    residency: Literal["device", "host"]
    """Where it lies."""
    layers: int
    """Number of layers that have such state."""
    rows: int
    """Tokens held, summed over layers; 0 for state that has none."""
    bytes: int
    """Of the whole storage."""

    def __post_init__(self) -> None:
        _check_counts(self)


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Peak memory of one rank."""

    rank: int
    """Global rank."""
    peak_bytes: int
    """Most bytes held at any moment of the run, as `counted` says."""
    categories: dict[str, int]
    """Bytes of it by category: weights, gradients, optimizer, reference, prompt_state, adjoints, and where tensors were counted
    response_state, staging, chunk_graph, logits and buffers."""
    counted: Literal["allocator", "process", "tensors"] = "process"
    """What `peak_bytes` and `phases` count: bytes of CUDA's allocator; resident memory of the process, libraries included (on a
    CPU); or the storages of tensors alone (a dry run, or a step measured to be compared with one)."""
    host_bytes: int = 0
    """Most bytes kept in host memory on purpose (pages, adjoints, masters, reference weights); `categories` leave them out."""
    host_categories: dict[str, int] = field(default_factory=dict)
    """Bytes of `host_bytes` by category."""
    phases: dict[str, int] = field(default_factory=dict)
    """Most bytes held within each phase, as `peak_bytes` counts them: of a run those at samples, a few a second and at each
    change of phase; empty where only the whole was measured."""

    def __post_init__(self) -> None:
        _check_counts(self)
        if sum(self.host_categories.values()) > self.host_bytes:
            raise ValueError(f"receipt: rank {self.rank}'s host categories sum to {sum(self.host_categories.values())} bytes, "
                             f"more than {self.host_bytes}")
        if sum(self.categories.values()) > self.peak_bytes:
            raise ValueError(f"receipt: rank {self.rank}'s memory categories sum to {sum(self.categories.values())} bytes, "
                             f"more than its peak of {self.peak_bytes}")

    @property
    def unattributed_bytes(self) -> int:
        """What no category claims."""
        return self.peak_bytes - sum(self.categories.values())


@dataclass(frozen=True, kw_only=True)
class MemoryMoment:
    """What was held at one moment."""

    seconds: float
    """Since the step's start, or the run's."""
    phase: str
    """That ran."""
    bytes: int
    """Held, as the memory's `counted` says."""

    def __post_init__(self) -> None:
        _check_counts(self)


@dataclass(frozen=True, kw_only=True)
class CollectiveUse:
    """What one kind of exchange over one group of ranks came to, on rank 0."""

    group: str
    """Ranks that took part: tp, cp, ep, dp, dp_cp, tp_cp, world and so on; of groups over the same ranks the first of these."""
    operation: str
    """As torch.distributed calls it: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, recv and so on."""
    calls: int
    """How often."""
    bytes: int
    """Of this rank's larger buffer (what is gathered, or what is reduced, scattered, sent or exchanged), over all calls."""

    def __post_init__(self) -> None:
        _check_counts(self)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One measured comparison with a bound, such as a gradient audit or ratio == 1 on the first update."""

    name: str
    """What was compared."""
    passed: bool
    """Whether the value was within the bound."""
    value: float | None = None
    """What was measured."""
    bound: float | None = None
    """What it was held to."""


@dataclass(frozen=True, kw_only=True)
class Results:
    """What came of it."""

    first_step: int
    """First step that this process ran (above 1 where it resumed)."""
    last_step: int
    """Last step committed."""
    first_eval_reward_mean: float | None
    """Mean reward on held-out prompts at the first evaluation on record."""
    last_eval_reward_mean: float | None
    """The same at the last."""

    def __post_init__(self) -> None:
        if not 0 <= self.first_step <= self.last_step + 1:
            raise ValueError(f"receipt: steps {self.first_step} to {self.last_step} are not a range")


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """One run: what it did, on what, at what cost."""

    schema_version: Literal[3] = SCHEMA_VERSION
    """Version of this format."""
    source: Literal["run", "dry_run"] = "run"
    """run: all figures were measured; dry_run: bytes and collectives were counted on fake tensors, seconds estimated."""
    command: tuple[str, ...]
    """The program and its arguments."""
    seed: int
    """Seed of weights, sampling and data order."""
    started: str
    """UTC, ISO 8601."""
    finished: str
    """UTC, ISO 8601."""
    semantics: Literal["exact", "response_only", "stale_prefix"]
    """What the gradient means; see the design's gradient semantics."""
    staleness: Staleness = field(default_factory=Staleness)
    """How old prompt states and responses were."""
    versions: Versions
    """The software."""
    topology: Topology
    """The layout over ranks."""
    model: Model
    """What was trained."""
    objective: dict[str, Scalar]
    """Every setting of the objective, by name, and of what takes part in it."""
    update: dict[str, Scalar] = field(default_factory=dict)
    """How the weights moved: `optimizer`; rates, schedules, decay, clipping and precisions wherever anything reads them; LoRA's rank
    and factor; and under logra every setting of it, among them `kl_probe_scope`, whether a predicted KL moved the prompt's state
    with the weights (full) or held it (response)."""
    rollout: dict[str, Scalar] = field(default_factory=dict)
    """Where rollouts came from (`source`: resident, vllm or store; `sampled_by`: who had sampled; `store`: the folder that was
    written or read), every setting of sampling, rewards and the mismatch, and how far the sampler was from the trainer at equal weights, over the
    run's steps: `log_ratio_mean` (trainer minus rollout, nats a token), `log_ratio_max` (a token's largest distance), `kl`."""
    tokens: Tokens
    """How many tokens, and of what kind."""
    state: tuple[ResidentState, ...]
    """Who held which state where."""
    memory: tuple[RankMemory, ...]
    """Peak memory of each rank; of a dry run, of the one rank that it ran."""
    seconds: dict[str, float]
    """Wall-clock seconds of rank 0 by phase, over all steps: a phase inside another interrupts it. `capture` runs the prompt
    forward, `responses` scores and replays the responses, `prompt_reverse` differentiates the prompt; what is left of `rollout`
    samples and rewards. Of a dry run, the estimate for its hardware; empty where there is none."""
    processor_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds that rank 0's process had of processors, all its threads together, by phase: where other work shares them, less
    than the wall clock's. Empty of a dry run."""
    phase_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens of prompts and responses that each phase ran through the model, over all replicas, each counted once however
    often the phase ran it. Only phases that run tokens."""
    memory_over_time: tuple[MemoryMoment, ...] = ()
    """What rank 0 held, a few moments of each phase; of a dry run, of the rank that it ran, the peak of each phase at its
    estimated middle; empty where neither was known."""
    collectives: tuple[CollectiveUse, ...] = ()
    """Exchanges of tensors between ranks by group and operation, of rank 0 (of a dry run, of the rank that it ran): barriers
    and Python objects are left out."""
    metrics: dict[str, Scalar] = field(default_factory=dict)
    """Of the last step: loss, kl, ratio_mean, ratio_max, clip_fraction, grad_norm and whatever its metrics.jsonl line has."""
    results: Results
    """What came of it."""
    checks: tuple[Check, ...] = ()
    """Comparisons made during the run."""

    def __post_init__(self) -> None:
        if self.semantics != "stale_prefix" and self.staleness.prefix_age_steps:
            raise ValueError(f"receipt: semantics {self.semantics} cannot have a prompt state "
                             f"{self.staleness.prefix_age_steps} steps old")
        started, finished = (datetime.fromisoformat(moment) for moment in (self.started, self.finished))
        if started.tzinfo is None or finished.tzinfo is None or finished < started:
            raise ValueError(f"receipt: started {self.started} and finished {self.finished} need a time zone and this order")
        ranks = [memory.rank for memory in self.memory]
        foreseen = self.source == "dry_run" and len(ranks) == 1 and 0 <= ranks[0] < self.topology.world_size
        if not foreseen and sorted(ranks) != list(range(self.topology.world_size)):
            raise ValueError(f"receipt: memory is given for ranks {sorted(ranks)} of {self.topology.world_size}")
        if strangers := {item.rank for item in self.state} - set(ranks):
            raise ValueError(f"receipt: state is given for ranks {sorted(strangers)}, which do not exist")
        _check_counts(self, signed=("rollout", "metrics"))
        validate(self.to_json(), build_schema(Receipt))

    def to_json(self) -> dict:
        """As plain JSON values."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Receipt":
        """Reads what `to_json` wrote. Raises ValueError, naming the place, for anything else."""
        validate(document, build_schema(cls))
        return _revive(cls, document)


def _revive(hint, value):
    """A JSON value as the type that a field is annotated with; the value has passed the schema."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return hint(**{name: _revive(hints[name], item) for name, item in value.items()})
    if origin is tuple:
        return tuple(_revive(arguments[0], item) for item in value)
    if origin in (types.UnionType, typing.Union) and float in arguments and type(value) is int and int not in arguments:
        return float(value)
    return float(value) if hint is float else value


def write_receipt(path: str | os.PathLike, receipt: Receipt, *, rank: int = 0) -> None:
    """Writes the receipt whole or not at all; ranks other than 0 write nothing."""
    if rank != 0:
        return
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".new")
    with open(draft, "w") as file:
        json.dump(receipt.to_json(), file, indent=2, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def read_receipt(path: str | os.PathLike) -> Receipt:
    """Reads and checks a receipt. Raises ValueError for a file that is not one."""
    return Receipt.from_json(json.loads(Path(path).read_text()))
