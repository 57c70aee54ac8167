"""Receipts side by side: first what makes them different computations, then their figures.

    runs = [open_receipts(path) for path in paths]
    for sentence in find_differences([run.receipt for run in runs]): ...
    rows = make_rows([run.receipt for run in runs])

Two receipts of different gradient semantics are not two speeds of one computation, so `find_differences` comes first wherever
figures are shown. Left out: drawing (`longstraw.receipts.compare_plot`) and printing (tools/compare_receipts.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from longstraw.receipts.console import format_bytes, format_seconds
from longstraw.receipts.receipt import RankMemory, Receipt, read_receipt

STEP_FOLDER = "receipts"
"""In a run's folder: a receipt for each step."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A receipt, and where it is a whole run's, its steps'."""

    name: str
    """What it is called in tables: the folder's name, or the file's."""
    receipt: Receipt
    """The whole, or the single step."""
    steps: tuple[Receipt, ...]
    """Each step, in order; the receipt itself where it has no others."""


def open_receipts(path: str | Path) -> Run:
    """A receipt file, or a run's folder: its receipt.json, or its last step's where it has none of that step or a later one.

    Raises ValueError, in one sentence, where there is none or it is not one.
    """
    path = Path(path)
    file = path / "receipt.json" if path.is_dir() else path
    folder = file.parent / STEP_FOLDER if file.name == "receipt.json" else None
    steps = () if folder is None else tuple(_read(step) for step in sorted(folder.glob("step-*.json")))
    receipt = _read(file) if file.is_file() else None
    if steps and (receipt is None or path.is_dir() and receipt.results.last_step < steps[-1].results.last_step):
        receipt = steps[-1]
    if receipt is None:
        raise ValueError(f"{path} has no receipt" if path.is_dir() else f"there is no file {path}")
    return Run(name=path.name or str(path.resolve().name), receipt=receipt, steps=steps or (receipt,))


def _read(file: Path) -> Receipt:
    try:
        return read_receipt(file)
    except (ValueError, RecursionError, OverflowError) as error:
        raise ValueError(f"{file} is not a receipt of this format: {error}") from error


def find_differences(receipts: Sequence[Receipt]) -> list[str]:
    """What makes the receipts different computations, gravest first: a sentence each, with every receipt's value.

    Semantics, staleness, measured or foreseen; then model and starting weights, tokens, seed, objective, update, sampling.
    """
    found = []
    for title, read in _MEANINGS:
        values = [read(receipt) for receipt in receipts]
        if any(value != values[0] for value in values):
            found.append(f"{title} differ: {' | '.join(map(str, values))}")
    for part in ("objective", "update", "rollout"):
        records = [getattr(receipt, part) for receipt in receipts]
        for name in sorted(set().union(*records) - _MEASURED):
            values = [record.get(name, "not given") for record in records]
            if any(value != values[0] for value in values):
                found.append(f"{part}.{name} differs: {' | '.join(map(str, values))}")
    return found


def differ_in_meaning(receipts: Sequence[Receipt]) -> bool:
    """Whether their gradients mean different things, some were only foreseen, or their memory counts other things."""
    return any(read(receipt) != read(receipts[0]) for _, read in _MEANINGS[:4] for receipt in receipts)


_MEASURED = {"log_ratio_mean", "log_ratio_max", "kl", "store"}
"""Entries of `Receipt.rollout` that are no settings."""

_COUNTED = {
    "allocator": "CUDA's allocator", "process": "the process's resident memory, libraries included", "tensors": "tensors alone",
}

_MEANINGS: tuple[tuple[str, Callable[[Receipt], object]], ...] = (
    ("gradient semantics", lambda r: r.semantics),
    ("staleness", lambda r: f"{r.staleness.policy}, prompts {r.staleness.prefix_age_steps} and rollouts "
                            f"{r.staleness.rollout_lag_steps} steps old"),
    ("sources", lambda r: {"run": "measured", "dry_run": "foreseen on fake tensors"}[r.source]),
    ("countings of memory", lambda r: _COUNTED[largest_rank(r).counted]),
    ("models", lambda r: f"{r.model.preset}, {r.model.parameters:,} parameters in {r.model.dtype}"),
    ("starting weights", lambda r: r.model.initial_weights),
    ("numbers of tokens", lambda r: f"{r.tokens.prompts} prompts of {r.tokens.prompt_tokens:,} tokens, "
                                    f"{r.tokens.responses} responses of {r.tokens.response_tokens:,}"),
    ("seeds", lambda r: r.seed),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure of every receipt: as text, and as numbers where it is one (None where a receipt lacks it)."""

    name: str
    values: tuple[float | None, ...]
    texts: tuple[str, ...]

    @property
    def ratios(self) -> tuple[float | None, ...]:
        """Each value over the first receipt's."""
        first = self.values[0]
        return tuple(None if first in (None, 0) or value is None else value / first for value in self.values)


def make_rows(receipts: Sequence[Receipt]) -> list[Row]:
    """The figures: topology, memory of the largest rank, seconds and tokens by phase, collectives, metrics, checks."""
    rows = [_text("semantics", receipts, lambda r: r.semantics), _text("source", receipts, lambda r: r.source),
            _text("ranks", receipts, describe_topology),
            _text("steps", receipts, lambda r: f"{r.results.first_step} to {r.results.last_step}")]
    rows += [_number(f"tokens: {name}", receipts, lambda r, name=name: getattr(r.tokens, name), "{:,.0f}".format)
             for name in (item.name for item in fields(receipts[0].tokens))]
    rows.append(_number("peak bytes", receipts, lambda r: largest_rank(r).peak_bytes, _bytes))
    rows += _by_name("  ", receipts, lambda r: largest_rank(r).categories, _bytes)
    rows.append(_text("peak bytes are of", receipts, lambda r: largest_rank(r).counted))
    rows.append(_number("host bytes", receipts, lambda r: max(m.host_bytes for m in r.memory), _bytes))
    rows += _by_name("  on the host: ", receipts, lambda r: largest_rank(r).host_categories, _bytes)
    rows += _by_name("peak in ", receipts, lambda r: largest_rank(r).phases, _bytes)
    rows.append(_number("seconds", receipts, lambda r: sum(r.seconds.values()) or None, format_seconds))
    rows += _by_name("  ", receipts, lambda r: r.seconds, format_seconds)
    rows.append(_number("processor seconds", receipts, lambda r: sum(r.processor_seconds.values()) or None, format_seconds))
    rows += _by_name("  ", receipts, lambda r: r.processor_seconds, format_seconds)
    rows += _by_name("tokens a second in ", receipts, tokens_per_second, "{:,.1f}".format)
    for unit in ("calls", "bytes"):
        rows += _by_name(f"{unit} of ", receipts, lambda r, unit=unit: collect_exchanges(r, unit), _UNITS[unit])
    rows += _by_name("", receipts, numeric_metrics, "{:.6g}".format)
    rows.append(_text("checks", receipts, describe_checks))
    return rows


def largest_rank(receipt: Receipt) -> RankMemory:
    """The rank with the highest peak."""
    return max(receipt.memory, key=lambda memory: memory.peak_bytes)


def describe_topology(receipt: Receipt) -> str:
    """As in "8: CP 8" or "1"."""
    layout = receipt.topology
    sizes = {"TP": layout.tensor_model_parallel_size, "CP": layout.context_parallel_size, "DP": layout.data_parallel_size,
             "EP": layout.expert_model_parallel_size}
    parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    return f"{layout.world_size}{': ' if parts else ''}{' x '.join(parts)} on {layout.device}"


def tokens_per_second(receipt: Receipt) -> dict[str, float]:
    """Of each phase that ran tokens."""
    return {name: tokens / receipt.seconds[name] for name, tokens in receipt.phase_tokens.items()
            if receipt.seconds.get(name)}


def collect_exchanges(receipt: Receipt, unit: str) -> dict[str, float]:
    """"operation over group" -> calls or bytes."""
    return {f"{use.operation} over {use.group}": float(getattr(use, unit)) for use in receipt.collectives}


def numeric_metrics(receipt: Receipt) -> dict[str, float]:
    """The last step's numbers, without those that stand elsewhere."""
    return {name: float(value) for name, value in receipt.metrics.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
            and name not in ("step", "seconds", "peak_bytes")}


def describe_checks(receipt: Receipt) -> str:
    """How many passed; the names of those that did not."""
    failed = [check.name for check in receipt.checks if not check.passed]
    return f"{len(receipt.checks) - len(failed)} of {len(receipt.checks)} passed" + (f", not {', '.join(failed)}" if failed else "")


def _text(name: str, receipts: Sequence[Receipt], read: Callable[[Receipt], str]) -> Row:
    return Row(name=name, values=(None,) * len(receipts), texts=tuple(read(receipt) for receipt in receipts))


def _number(name: str, receipts: Sequence[Receipt], read: Callable[[Receipt], float | None], show: Callable) -> Row:
    values = tuple(read(receipt) for receipt in receipts)
    return Row(name=name, values=values, texts=tuple("-" if value is None else show(value) for value in values))


def _by_name(prefix: str, receipts: Sequence[Receipt], read: Callable[[Receipt], dict], show: Callable) -> list[Row]:
    """A row for each name that any receipt has."""
    names = dict.fromkeys(name for receipt in receipts for name in read(receipt))
    return [_number(f"{prefix}{name}", receipts, lambda r, name=name: read(r).get(name), show) for name in names]


def _bytes(value: float) -> str:
    return f"{int(value):,} ({format_bytes(int(value))})"


_UNITS: dict[str, Callable[[float], str]] = {"calls": "{:,.0f}".format, "bytes": _bytes}
