"""What a dry run (or a measured step) found, as plain JSON values and as a table.

    peak_bytes    {device, host}: the most that the rank's tensors hold at once
    categories    {device, host}: by category, at that moment
    phases        name -> {device, host} -> {bytes, categories}: the same for each phase
    collectives   group -> operation -> {calls, bytes}
    work          phase -> floating-point operations by kind, and bytes moved
    seconds       machine -> bound, estimate, the row that limits, and the same for each phase (`time_model`)
"""

from collections import Counter

from longstraw.dry_run.counter import OperationCounter
from longstraw.dry_run.hardware import HARDWARE
from longstraw.dry_run.time_model import estimate_times
from longstraw.dry_run.tracker import PLACES, MemoryTracker, Peak
from longstraw.memory_scopes import CATEGORIES

GB = 10**9


def describe_memory(tracker: MemoryTracker) -> dict:
    """`peak_bytes`, `categories` and `phases` of everything that a tracker has seen."""
    phases = {
        name: {place: {"bytes": peak.bytes, "categories": peak.categories} for place, peak in peaks.items()}
        for name, peaks in tracker.phases.items() if name != "outside"
    }
    largest = {place: max((peaks[place] for peaks in tracker.phases.values()), key=_bytes_of) for place in PLACES}
    return {
        "peak_bytes": {place: peak.bytes for place, peak in largest.items()},
        "categories": {place: peak.categories for place, peak in largest.items()},
        "phases": phases,
    }


def describe_collectives(counter: OperationCounter, *, without: str = "") -> dict:
    """`collectives` of all phases together. without: a phase that is left out."""
    total: Counter[tuple[str, str, str]] = Counter()
    for name, counts in counter.read().items():
        if name != without:
            total.update(counts.collectives)
    found: dict[str, dict[str, dict[str, int]]] = {}
    for (group, operation, unit), number in sorted(total.items()):
        found.setdefault(group, {}).setdefault(operation, {})[unit] = round(number)
    return found


def describe_work(counter: OperationCounter) -> dict:
    """`work` of each phase: floating-point operations by kind, and bytes moved."""
    return {
        name: {
            "operations": dict(counts.operations), "traffic": counts.traffic, "copies_in": counts.copies_in,
            "copies_out": counts.copies_out, "host_traffic": counts.host_traffic, "kernels": round(counts.kernels),
        }
        for name, counts in counter.read().items() if counts.traffic
    }


def describe_times(counter: OperationCounter) -> dict:
    """`seconds`: machine -> the step's bound and estimate, the row that limits it, and each phase's."""
    found = {}
    for name, hardware in HARDWARE.items():
        times = estimate_times(counter, hardware)
        rows: Counter[str] = Counter()
        for time in times.values():
            rows.update(time.rows)
        found[name] = {
            "bound": sum(time.bound for time in times.values()), "estimate": sum(time.estimate for time in times.values()),
            "limit": max(rows, key=rows.__getitem__, default="nothing"), "rows": dict(rows),
            "phases": {
                phase: {"bound": time.bound, "estimate": time.estimate, "limit": time.limit, "rows": dict(time.rows)}
                for phase, time in times.items()
            },
        }
    return found


def _bytes_of(peak: Peak) -> int:
    return peak.bytes


def tabulate_memory(report: dict, place: str) -> list[list[str]]:
    """Rows of GB (10^9 bytes): a heading, each phase's peak by category, and the whole step's."""
    columns = [name for name in CATEGORIES if any(
        name in peaks[place]["categories"] for peaks in report["phases"].values()
    )]
    rows = [["phase", *columns, "peak"]]
    for name, peaks in report["phases"].items():
        rows.append(_row(name, peaks[place]["categories"], columns, peaks[place]["bytes"]))
    rows.append(_row("step", report["categories"][place], columns, report["peak_bytes"][place]))
    return rows


def _row(name: str, categories: dict[str, int], columns: list[str], total: int) -> list[str]:
    return [name, *(_format(categories.get(column, 0)) for column in columns), _format(total)]


def _format(size: int) -> str:
    return "-" if not size else f"{size / GB:.3f}" if size >= GB / 1000 else f"{size / GB:.1e}"


def tabulate_times(report: dict, machine: str) -> list[list[str]]:
    """Rows of seconds: a heading, each phase's, and the whole step's."""
    times = report["seconds"][machine]
    rows = [["phase", "bound", "estimate", "limited by"]]
    for name, time in times["phases"].items():
        rows.append([name, _seconds(time["bound"]), _seconds(time["estimate"]), _name_limit(time)])
    rows.append(["step", _seconds(times["bound"]), _seconds(times["estimate"]), _name_limit(times)])
    return rows


def _name_limit(time: dict) -> str:
    return f"{time['limit']} ({time['rows'][time['limit']] / time['estimate']:.0%})" if time["rows"] else "-"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f}" if seconds >= 1 else f"{seconds:.2g}"
