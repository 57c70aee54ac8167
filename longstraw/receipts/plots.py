"""Pictures of a run: reward over steps, and where each rank's memory went.

Drawn with matplotlib's Agg backend, so no display is needed. Left out: anything interactive (TensorBoard has it).
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from longstraw.receipts.metrics import EVAL_KEY
from longstraw.receipts.receipt import Receipt

INK, FAINT, GRID = "#1f2430", "#6b7280", "#e5e7eb"
TRAIN, EVALUATION = "#9db8d9", "#c2410c"
CATEGORY_COLOURS = ("#1e3a8a", "#2563eb", "#60a5fa", "#0d9488", "#5eead4", "#f59e0b", "#fcd34d", "#9333ea", "#d8b4fe")
UNATTRIBUTED = "#d1d5db"
BYTE_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def scale_bytes(largest: int) -> tuple[int, str]:
    """The unit in which `largest` reads as 1 or more: (bytes in it, its name)."""
    return next((unit for unit in BYTE_UNITS if largest >= unit[0]), (1, "bytes"))


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and those before it, `window` of them at most."""
    return [sum(values[max(0, end - window):end]) / min(window, end) for end in range(1, len(values) + 1)]


def draw_rewards(axes, records: Sequence[Mapping]) -> None:
    """Reward of the training groups by step, its running mean, and the held-out reward where it was measured."""
    from matplotlib.patheffects import withStroke

    train = [(record["step"], record["reward_mean"]) for record in records if record["reward_mean"] is not None]
    evaluations = [(record["step"], record[EVAL_KEY]) for record in records if record.get(EVAL_KEY) is not None]
    if train:
        steps, rewards = zip(*train)
        window = max(1, min(10, len(steps) // 4))
        axes.plot(steps, rewards, color=TRAIN, linewidth=1, alpha=0.75, label="training groups")
        if window > 1:
            axes.plot(steps, smooth(rewards, window), color="#1d4ed8", linewidth=2, label=f"mean of {window} steps")
    if evaluations:
        steps, rewards = zip(*evaluations)
        axes.plot(steps, rewards, color=EVALUATION, linewidth=1.5, marker="o", markersize=6, markeredgecolor="white",
                  label="held-out prompts", zorder=3)
        for index in {0, len(steps) - 1}:
            axes.annotate(f"{rewards[index]:.2f}", (steps[index], rewards[index]), xytext=(0, 9), color=EVALUATION,
                          textcoords="offset points", ha="center", fontsize=9, fontweight="bold", zorder=4,
                          path_effects=[withStroke(linewidth=3, foreground="white")])
    finish_axes(axes, "Mean reward", "step", None)
    if train or evaluations:
        axes.margins(x=0.03, y=0.12)
        axes.legend(frameon=False, loc="best", fontsize=9, labelcolor=INK)


def split_memory(receipt: Receipt) -> list[tuple[str, list[int]]]:
    """(name, bytes of each rank) of what the peaks were made of, largest first, ending with what nothing claims.

    The categories where the run measured them, else the ledger's classes of state that lay on the device. Empty where
    the receipt has neither.
    """
    parts: dict[str, list[int]] = {}
    for place, rank in enumerate(receipt.memory):
        for name, size in rank.categories.items():
            parts.setdefault(name, [0] * len(receipt.memory))[place] += size
    if not parts:
        places = {rank.rank: place for place, rank in enumerate(receipt.memory)}
        for item in receipt.state:
            if item.residency == "device":
                parts.setdefault(item.kind, [0] * len(receipt.memory))[places[item.rank]] += item.bytes
    if not parts:
        return []
    layers = sorted(parts.items(), key=lambda part: -sum(part[1]))
    others = [rank.peak_bytes - sum(sizes[place] for _, sizes in layers) for place, rank in enumerate(receipt.memory)]
    return [*layers, ("everything else", [max(0, size) for size in others])]


def draw_memory(axes, receipt: Receipt) -> None:
    """Each rank's peak as a bar, stacked by what it was made of where the receipt says so."""
    peaks = [rank.peak_bytes for rank in receipt.memory]
    divisor, unit = scale_bytes(max(peaks))
    places, floor = range(len(peaks)), [0.0] * len(peaks)
    layers = split_memory(receipt)
    for index, (name, sizes) in enumerate(layers or [("", peaks)]):
        colour = UNATTRIBUTED if layers and index == len(layers) - 1 else CATEGORY_COLOURS[(index + 1) % len(CATEGORY_COLOURS)]
        if any(sizes):
            heights = [size / divisor for size in sizes]
            axes.bar(places, heights, bottom=floor, width=0.62, color=colour, edgecolor="white", linewidth=0.8,
                     label=name.replace("_", " "))
            floor = [low + height for low, height in zip(floor, heights)]
    if len(peaks) <= 8:
        for place, peak in enumerate(peaks):
            axes.annotate(f"{peak / divisor:.3g}", (place, floor[place]), xytext=(0, 4), textcoords="offset points",
                          ha="center", fontsize=9, color=INK, fontweight="bold")
    step = max(1, -(-len(peaks) // 16))
    axes.set_xticks(list(places)[::step], [str(rank.rank) for rank in receipt.memory][::step])
    finish_axes(axes, "Peak memory by rank", "rank", unit)
    axes.set_xlim(-0.7, max(len(peaks), 2) - 0.3)
    axes.margins(y=0.1)
    if layers:
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9,
                    labelcolor=INK)


def draw_peaks(axes, records: Sequence[Mapping]) -> None:
    """Peak bytes of rank 0 by step: flat when nothing leaks."""
    peaks = [record["peak_bytes"] for record in records]
    divisor, unit = scale_bytes(max(peaks, default=0))
    axes.plot([record["step"] for record in records], [peak / divisor for peak in peaks], color="#1d4ed8", linewidth=2)
    axes.set_ylim(0, max(peaks, default=0) / divisor * 1.25 or 1)
    finish_axes(axes, "Peak memory by step, rank 0", "step", unit)


def finish_axes(axes, title: str, x_label: str, y_label: str | None) -> None:
    """Title, labels and the quiet frame of every picture."""
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK, pad=12)
    axes.set_xlabel(x_label, color=FAINT)
    if y_label:
        axes.set_ylabel(y_label, color=FAINT)
    if x_label == "step":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, length=0, labelsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)


def plot_run(path: str | os.PathLike, records: Sequence[Mapping], receipt: Receipt | None = None, *, title: str = "",
             rank: int = 0) -> None:
    """Writes the run's picture as a PNG: rewards on the left, memory on the right. Ranks other than 0 write nothing.

    Without a receipt the memory is rank 0's peak at each step.

    Raises:
        ValueError: there is no step to draw.
    """
    if not records:
        raise ValueError(f"no step to draw in {path}")
    if rank != 0:
        return
    figure, (left, right) = start_figure()
    draw_rewards(left, records)
    if receipt is not None:
        draw_memory(right, receipt)
    else:
        draw_peaks(right, records)
    if title:
        figure.suptitle(title, x=0.012, ha="left", fontsize=10, color=FAINT)
    save_figure(figure, path)


def start_figure():
    """A figure and its two axes, the left one wider."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    return figure, figure.subplots(1, 2, width_ratios=(1.35, 1))


def save_figure(figure, path: str | os.PathLike) -> None:
    """Writes a PNG whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".new")
    figure.savefig(draft, format="png")
    os.replace(draft, path)
