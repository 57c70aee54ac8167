"""Receipts as a picture: memory over time or over steps, and where the seconds went.

Left out: figures (`longstraw.receipts.compare`).
"""

import os
from collections.abc import Sequence

from longstraw.receipts.compare import Run, largest_rank
from longstraw.receipts.plots import CATEGORY_COLOURS, finish_axes, save_figure, scale_bytes, start_figure


def plot_comparison(path: str | os.PathLike, runs: Sequence[Run]) -> None:
    """Writes a PNG. Left: what was held over the seconds of a step; where a run has several, its peak at each. Right: the
    seconds of a step by phase."""
    figure, (left, right) = start_figure()
    draw_memory = draw_memory_over_steps if any(len(run.steps) > 1 for run in runs) else draw_memory_over_time
    draw_memory(left, runs)
    draw_phases(right, runs)
    save_figure(figure, path)


def draw_memory_over_time(axes, runs: Sequence[Run]) -> None:
    """What rank 0 held at each moment, of a dry run the peak of each phase; the peak alone, dashed, where no time is known."""
    held = [[moment.bytes for moment in run.receipt.memory_over_time] for run in runs]
    peaks = [largest_rank(run.receipt).peak_bytes for run in runs]
    divisor, unit = scale_bytes(max(peaks))
    for place, run in enumerate(runs):
        style = dict(color=CATEGORY_COLOURS[place % len(CATEGORY_COLOURS)], label=name_line(run))
        if held[place]:
            seconds = [moment.seconds for moment in run.receipt.memory_over_time]
            foreseen = run.receipt.source == "dry_run"
            axes.plot(seconds, [size / divisor for size in held[place]], linewidth=1.8, marker="o" if foreseen else "",
                      markersize=3.5, **style)
        else:
            axes.axhline(peaks[place] / divisor, linewidth=1.4, linestyle="--", **style)
    finish_axes(axes, "Memory over a step", "seconds", unit)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="best", fontsize=9)


def draw_memory_over_steps(axes, runs: Sequence[Run]) -> None:
    """The largest rank's peak at each step."""
    peaks = {place: [largest_rank(step).peak_bytes for step in run.steps] for place, run in enumerate(runs)}
    divisor, unit = scale_bytes(max((max(own) for own in peaks.values()), default=1))
    for place, run in enumerate(runs):
        steps = [step.results.last_step for step in run.steps]
        axes.plot(steps, [peak / divisor for peak in peaks[place]], marker="o", markersize=3.5, linewidth=1.8,
                  color=CATEGORY_COLOURS[place % len(CATEGORY_COLOURS)], label=name_line(run))
    finish_axes(axes, "Peak memory of the largest rank", "step", unit)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="best", fontsize=9)


def name_line(run: Run) -> str:
    """The run's name, and what its figures mean."""
    foreseen = ", foreseen" if run.receipt.source == "dry_run" else ""
    return f"{run.name} ({run.receipt.semantics}{foreseen}; {largest_rank(run.receipt).counted})"


def draw_phases(axes, runs: Sequence[Run]) -> None:
    """Seconds a step, stacked by phase."""
    phases = dict.fromkeys(name for run in runs for name in run.receipt.seconds)
    bottoms = [0.0] * len(runs)
    for colour, name in zip(CATEGORY_COLOURS * (1 + len(phases) // len(CATEGORY_COLOURS)), phases):
        heights = [run.receipt.seconds.get(name, 0.0) / count_steps(run) for run in runs]
        axes.bar(range(len(runs)), heights, bottom=bottoms, color=colour, width=0.6, label=name)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights)]
    finish_axes(axes, "Seconds a step by phase", "", "seconds")
    axes.set_xticks(range(len(runs)), [run.name for run in runs], rotation=20 if len(runs) > 3 else 0)
    if phases:
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)


def count_steps(run: Run) -> int:
    """Steps that the run's receipt covers, at least 1."""
    return max(1, run.receipt.results.last_step - run.receipt.results.first_step + 1)
