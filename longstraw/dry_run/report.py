"""What a dry run (or a measured step) found, as plain JSON values and as a table.

    peak_bytes    {device, host}: the most that the rank's tensors hold at once
    categories    {device, host}: by category, at that moment
    phases        name -> {device, host} -> {bytes, categories}: the same for each phase
    collectives   group -> operation -> {calls, bytes}
"""

from longstraw.dry_run.counter import OperationCounter
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


def describe_collectives(counter: OperationCounter) -> dict:
    """`collectives` of all phases together."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for counts in counter.read().values():
        for (group, operation), (calls, size) in counts.collectives.items():
            entry = found.setdefault(group, {}).setdefault(operation, {"calls": 0, "bytes": 0})
            entry["calls"] += calls
            entry["bytes"] += size
    return {
        group: {name: {key: round(value) for key, value in entry.items()} for name, entry in operations.items()}
        for group, operations in sorted(found.items())
    }


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
