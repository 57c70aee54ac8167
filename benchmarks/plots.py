"""The page's pictures: step time and peak memory over prompt length and group size, and longest prompts.

Left out: anything interactive. Drawn without a display.
"""

from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

from benchmarks.page_steps import QUANTITIES, Steps  # noqa: E402

COLOURS = {
    "exact": "#c2410c", "response_only": "#f59e0b", "conventional": "#1e3a8a", "checkpointed": "#60a5fa", "trl": "#0d9488",
    "trl_checkpointed": "#5eead4", "prefix_grouper": "#9333ea", "prefix_grouper_checkpointed": "#d8b4fe",
}
"""A system's colour in every picture."""


def draw_all(steps: Steps, limits: dict[str, int], folder: Path) -> dict[str, Path]:
    """Draw what there are results for; returns title -> file.

    limits: system -> longest prompt.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for axis in ("prompt_length", "group_size"):
        for quantity in ("cpu_seconds", "rss_bytes"):
            lines = collect_lines(steps, axis, quantity)
            if lines:
                title = f"{QUANTITIES[quantity]}, by {axis.replace('_', ' ')}"
                drawn[title] = _draw_lines(lines, axis, quantity, title, folder / f"{quantity}_by_{axis}.png")
    if limits:
        drawn["Longest prompt under the memory limit"] = _draw_limits(limits, folder / "longest_prompt.png")
    return drawn


def collect_lines(steps: Steps, axis: str, quantity: str) -> dict[str, list[tuple[int, float]]]:
    """System -> (size, median) along one axis: the largest set of points that are equal in all else, two at least."""
    sets: dict[tuple, list] = {}
    for (preset, point), systems in steps.items():
        sizes = {"prompt_length": point.prompt_length, "group_size": point.group_size}
        at = sizes.pop(axis)
        sets.setdefault((preset, *sizes.values(), point.response_length), []).append((at, systems))
    most = max(sets.values(), key=len, default=[])
    if len(most) < 2:
        return {}
    lines: dict[str, list] = {}
    for at, systems in sorted(most, key=lambda entry: entry[0]):
        for system, turns in systems.items():
            values = [figures[quantity] for figures in turns.values() if quantity in figures]
            if values:
                lines.setdefault(system, []).append((at, median(values)))
    return lines


def _draw_lines(lines: dict[str, list], axis: str, quantity: str, title: str, path: Path) -> Path:
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    scale = 1e6 if quantity.endswith("bytes") else 1
    for system, points in lines.items():
        ats, values = zip(*points)
        width = 2.5 if system == "exact" else 1.3
        axes.plot(ats, [value / scale for value in values], marker="o", color=COLOURS.get(system), label=system, linewidth=width)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel=axis.replace("_", " "), ylabel="MB" if scale > 1 else "s", title=title)
    axes.set_xticks(sorted({at for points in lines.values() for at, _ in points}))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(color="#e5e7eb")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _draw_limits(limits: dict[str, int], path: Path) -> Path:
    figure, axes = pyplot.subplots(figsize=(7, 3), layout="constrained")
    bars = axes.barh(list(limits), list(limits.values()), color=[COLOURS.get(system) for system in limits])
    axes.bar_label(bars, labels=[f"{length:,}" for length in limits.values()], padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(xlabel="prompt tokens", title="Longest prompt under the memory limit")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
