"""Operations, memory traffic and exchanges of each phase, counted as a step runs.

Operations are floating-point operations of matrix products, attention and the delta rule, by kind: `matmul_16` (operands of 16
bits), `matmul_32`, `attention`, `delta_rule`. Traffic is what each operation reads and writes, as if nothing stayed in a cache;
an operation that only gives a view counts nothing. The least traffic is that of operations with products alone: the others
could be fused into them. `copies_in` and `copies_out` are bytes to the device and to the host, `host_traffic` what operations
on host tensors move there.

An operation takes the longest of its operations, its traffic and a launch, on each machine of the hardware table; the time
goes to the row that it is longest in.

Collectives count by group, operation and phase, as `longstraw.exchanges` tells of them.

What ran once and stands for n pieces counts n times (`standing_for`).

B batch, H query heads, G key heads, S queries, N keys, D head dim, T tokens, K key dim, V value dim.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.utils.flop_counter import flop_registry

from longstraw.dry_run.fused_ops import CHUNK
from longstraw.dry_run.hardware import HARDWARE, Hardware

_aten, _c10d = torch.ops.aten, torch.ops.c10d
_fused = torch.ops.longstraw_dry


@dataclass
class PhaseCounts:
    """One phase's. tally: how often each cost was met, and where (on the device, on the host, copying in or out); copied: bytes
    that were copied beside that; collectives: (group,
    operation, calls or bytes) -> number. The rest follows when the phase is read:
    operations, by kind; traffic, kernels and copies in total; seconds: machine -> row -> of the estimate."""

    tally: Counter[tuple[tuple, str]] = field(default_factory=Counter)
    copied: Counter[str] = field(default_factory=Counter)
    collectives: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    operations: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    traffic: float = 0.0
    least_traffic: float = 0.0
    host_traffic: float = 0.0
    kernels: float = 0.0
    copies_in: float = 0.0
    copies_out: float = 0.0
    seconds: dict[str, dict[str, float]] = field(
        default_factory=lambda: {name: defaultdict(float) for name in HARDWARE}
    )


@dataclass(frozen=True)
class Cost:
    """Of one operation: what it reads and writes, and its floating-point operations of a kind, if any."""

    moved: int
    kind: str | None
    operations: float

    def add_to(self, counts: PhaseCounts, where: str, times: float) -> None:
        """Count it so many times."""
        if where in ("in", "out"):  # each byte is read on one side and written on the other
            counts.copied[where] += times * self.moved / 2
            return
        if where == "host":
            counts.host_traffic += times * self.moved
            return
        counts.kernels += times
        counts.traffic += times * self.moved
        if self.kind:
            counts.operations[self.kind] += times * self.operations
            counts.least_traffic += times * self.moved
        for name, rates in _RATES.items():
            busy = self.operations / rates[self.kind] if self.kind else 0.0
            streaming = self.moved / rates["memory"]
            if max(busy, streaming) <= rates["launch"]:
                row, seconds = "launches", rates["launch"]
            elif busy < streaming:
                row, seconds = "memory", streaming
            else:
                row, seconds = "matmul" if self.kind.startswith("matmul") else self.kind, busy
            counts.seconds[name][row] += times * seconds


def _scan_traffic(args) -> int:
    """Scores of every head in float32: written, clipped, weighted and summed."""
    queries, heads = args[1].shape[:2]
    return 4 * 5 * queries * heads * len(args[3])


TRAFFIC = {_fused.scan.default: _scan_traffic}
"""Bytes that an operation moves beside its arguments and results."""


def find_cost(func, args: tuple, result) -> Cost | None:
    """That of an operation with these arguments and results; None where it moves nothing."""
    if not _makes_something(func):
        return None
    moved = _bytes(args)
    if func not in _OVERWRITE:
        moved += _bytes(result if isinstance(result, (list, tuple)) else (result,))
    moved += TRAFFIC[func](args) if func in TRAFFIC else 0
    kind, operations = RULES[func](args, result) if func in RULES else (None, 0.0)
    return Cost(moved, kind, operations)


@dataclass(frozen=True)
class GroupSpan:
    """How many ranks a group has, and on how many nodes."""

    size: int
    nodes: int


class OperationCounter:
    """name_group: a process group -> its name in the report and its span."""

    def __init__(self, name_group: Callable[[object], tuple[str, GroupSpan]]):
        self.phases: dict[str, PhaseCounts] = {}
        self.spans: dict[str, GroupSpan] = {}
        self.name_group = name_group
        self._costs: dict[tuple, Cost | None] = {}
        self._times, self._phase = 1.0, "outside"
        self._counts = self.phases.setdefault(self._phase, PhaseCounts())

    def read(self) -> dict[str, PhaseCounts]:
        """The phases, with all that follows from what was met."""
        for counts in self.phases.values():
            tally, counts.tally = counts.tally, Counter()
            for (key, where), times in tally.items():
                if (cost := self._costs[key]) is not None:
                    cost.add_to(counts, where, times)
            counts.copies_in, counts.copies_out = counts.copied["in"], counts.copied["out"]
        return self.phases

    def note(self) -> tuple[Counter, ...]:
        """What the present phase has counted up to now, for `since`."""
        counts = self._counts
        return Counter(counts.tally), Counter(counts.copied), Counter(counts.collectives)

    def since(self, before: tuple[Counter, ...]) -> tuple[Counter, ...]:
        """What the present phase has counted since a note."""
        now = self.note()
        for counted, earlier in zip(now, before):
            counted.subtract(earlier)
        return now

    def count_again(self, work: tuple[Counter, ...]) -> None:
        """Count a piece of work, from `since`, once more in the present phase."""
        counts = self._counts
        for held, counted in zip((counts.tally, counts.copied, counts.collectives), work):
            held.update(counted)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A stretch of the work; one inside another interrupts it."""
        before = self._counts
        self._counts = self.phases.setdefault(name, PhaseCounts())
        try:
            yield
        finally:
            self._counts = before

    @contextmanager
    def standing_for(self, pieces: float) -> Iterator[None]:
        """What runs inside counts so many times."""
        before, self._times = self._times, self._times * pieces
        try:
            yield
        finally:
            self._times = before

    def see(self, key: tuple, func, args: tuple, result, *, on_host: list[bool]) -> None:
        """Count one operation. key: what decides its cost. on_host: whether each of its tensors lies on the host."""
        if True not in on_host:
            entry = key, "device"
        elif func is _aten.copy_.default and on_host[0] != on_host[-1]:
            entry = key, "out" if on_host[0] else "in"
        else:
            entry = key, "host"
        if key not in self._costs:
            self._costs[key] = find_cost(func, args, result)
        self._counts.tally[entry] += self._times

    def see_copy(self, size: int, *, out: bool) -> None:
        """Count bytes to the device, or out of it."""
        self._counts.copied["out" if out else "in"] += self._times * size

    def see_exchange(self, group, operation: str, size: int) -> None:
        """Count one collective, as `longstraw.exchanges` tells of it."""
        label, span = self.name_group(group)
        self.spans[label] = span
        found = self._counts.collectives
        found[label, operation, "calls"] += self._times
        found[label, operation, "bytes"] += self._times * size


def _rates(hardware: Hardware) -> dict[str, float]:
    """What a machine gets of each kind of work a second, and the seconds of a launch."""
    part = hardware.efficiencies
    return {
        "matmul_16": hardware.flops_16 * part.matmul, "matmul_32": hardware.flops_32 * part.matmul,
        "attention": hardware.flops_16 * part.attention, "delta_rule": hardware.flops_16 * part.delta_rule,
        "memory": hardware.memory_bandwidth * part.memory, "launch": hardware.launch,
    }


_RATES = {name: _rates(hardware) for name, hardware in HARDWARE.items()}

_OVERWRITE = {_aten.copy_.default, _aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor}
"""They do not read what they write to."""

def _makes_something(func) -> bool:
    """Whether an operation reads and writes memory: it is no view of its arguments."""
    if torch.Tag.inplace_view in func.tags or func._schema.name in ("aten::_unsafe_view", "aten::lift_fresh"):
        return False
    returns = func._schema.returns
    return not returns or not all(item.alias_info is not None and not item.alias_info.is_write for item in returns)


def _bytes(tree) -> int:
    total = 0
    for leaf in tree:
        if isinstance(leaf, torch.Tensor):
            total += leaf.numel() * leaf.element_size()
        elif isinstance(leaf, (list, tuple)):
            total += _bytes(leaf)
    return total


def _product(packet, arguments: int):
    """A matrix product, by torch's own rule. arguments: how many of them it reads."""
    formula = flop_registry[packet]

    def rule(args, result):
        narrow = args[1].element_size() <= 2  # of addmm and convolution too this is a factor
        return ("matmul_16" if narrow else "matmul_32"), formula(*args[:arguments], out_val=result)

    return rule


def _attention(products: int, queries: int, keys: int, causal: int):
    """Attention of so many products of [S, D] and [D, N]; queries, keys, causal: places of these arguments."""

    def rule(args, result):
        batch, heads, rows, width = args[queries].shape
        half = 0.5 if len(args) > causal and args[causal] else 1.0
        return "attention", 2.0 * products * half * batch * heads * rows * args[keys].shape[2] * width

    return rule


def _delta_rule(passes: float):
    """The chunked delta rule: within a chunk of C tokens four products of [C, C] with [C, K or V] and the system's inverse,
    between chunks three of [C, K] with [K, V]."""

    def rule(args, result):
        k, v = (args[1], args[2]) if passes == 1.0 else (args[3], args[4])
        tokens = k.shape[0] * k.shape[1] * k.shape[2]
        width_k, width_v = k.shape[3], v.shape[3]
        within = 2.0 * CHUNK * (3 * width_k + 2 * width_v) + 2.0 * CHUNK**2 / 3
        return "delta_rule", passes * tokens * (within + 6.0 * width_k * width_v)

    return rule


RULES: dict = {
    overload: _product(packet, arguments)
    for packet, arguments in ((_aten.mm, 2), (_aten.addmm, 3), (_aten.bmm, 2), (_aten.baddbmm, 3))
    for overload in (getattr(packet, name) for name in packet.overloads())
} | {
    _aten.convolution.default: _product(_aten.convolution, 9),
    _aten._scaled_dot_product_flash_attention.default: _attention(2, 0, 1, 4),
    _aten._scaled_dot_product_flash_attention_backward.default: _attention(5, 1, 2, 11),
    _aten._scaled_dot_product_efficient_attention.default: _attention(2, 0, 1, 6),
    _aten._scaled_dot_product_efficient_attention_backward.default: _attention(5, 1, 2, 11),
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention(2, 0, 1, 4),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention(5, 1, 2, 7),
    _fused.scan.default: lambda args, result: ("matmul_16", 2.0 * args[1].numel() * len(args[3])),
    _fused.delta_rule_fwd.default: _delta_rule(1.0),
    _fused.delta_rule_bwd.default: _delta_rule(2.5),
}
"""Operation -> (kind, floating-point operations) of its arguments and results."""
