"""Receipts as a picture: memory over steps, and where the seconds went.

Left out: figures (`longstraw.receipts.compare`).
"""

import os
from collections.abc import Sequence

from longstraw.receipts.compare import Run, largest_rank
from longstraw.receipts.plots import CATEGORY_COLOURS, finish_axes, save_figure, scale_bytes, start_figure


def plot_comparison(path: str | os.PathLike, runs: Sequence[Run]) -> None:
    """Writes a PNG: each run's peak memory by step (a single receipt is one point), and its seconds a step by phase."""
    figure, (left, right) = start_figure()
    draw_memory_over_steps(left, runs)
    draw_phases(right, runs)
    save_figure(figure, path)


def draw_memory_over_steps(axes, runs: Sequence[Run]) -> None:
    """The largest rank's peak at each step."""
    peaks = {place: [largest_rank(step).peak_bytes for step in run.steps] for place, run in enumerate(runs)}
    divisor, unit = scale_bytes(max((max(own) for own in peaks.values()), default=1))
    for place, run in enumerate(runs):
        steps = [step.results.last_step for step in run.steps]
        axes.plot(steps, [peak / divisor for peak in peaks[place]], marker="o", markersize=3.5, linewidth=1.8,
                  color=CATEGORY_COLOURS[place % len(CATEGORY_COLOURS)], label=f"{run.name} ({run.receipt.semantics})")
    finish_axes(axes, "Peak memory of the largest rank", "step", unit)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="best", fontsize=9)


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
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)


def count_steps(run: Run) -> int:
    """Steps that the run's receipt covers, at least 1."""
    return max(1, run.receipt.results.last_step - run.receipt.results.first_step + 1)
