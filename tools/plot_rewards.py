"""Reward curves of several runs in one picture: a line for each label, over all runs that carry it.

    python tools/plot_rewards.py Adam=runs/a1 Adam=runs/a2 LoGRA=runs/l1 LoGRA=runs/l2 --output rewards.png

Each LABEL=FOLDER is the output folder of a run (its metrics.jsonl). Thin lines are single runs; the thick line is the mean of
a label's runs at the steps that all of them measured. Left: held-out reward; right: reward of the training groups, as the
running mean of --window steps. The table that is printed gives every run's held-out rewards.

Exit code 0: drawn. 2: a flag or a folder that cannot be read, in one sentence.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from longstraw.receipts.metrics import EVAL_KEY, read_metrics  # noqa: E402
from longstraw.receipts.plots import finish_axes, save_figure, smooth, start_figure  # noqa: E402

COLOURS = ("#1d4ed8", "#c2410c", "#0d9488", "#9333ea", "#b45309", "#475569")
Curve = dict[int, float]


def read_runs(runs: Sequence[str]) -> dict[str, list[tuple[str, list[dict]]]]:
    """LABEL=FOLDER texts -> label -> (folder, its records), in the order given.

    Raises ValueError, in one sentence, where a text has no label or a folder no metrics.
    """
    found: dict[str, list[tuple[str, list[dict]]]] = {}
    for text in runs:
        label, _, folder = text.partition("=")
        if not label or not folder:
            raise ValueError(f"{text} is not LABEL=FOLDER")
        path = Path(folder) / "metrics.jsonl"
        if not path.is_file():
            raise ValueError(f"{folder} has no metrics.jsonl: it is not the output folder of a run")
        records = read_metrics(path)
        if not records:
            raise ValueError(f"{path} has no step")
        found.setdefault(label, []).append((folder, records))
    return found


def held_out(records: Sequence[Mapping]) -> Curve:
    """Optimizer steps taken -> held-out reward; 0 is the policy that the run started from."""
    curve = {record["step"]: record[EVAL_KEY] for record in records if record.get(EVAL_KEY) is not None}
    first = records[0]
    before = first.get(f"{EVAL_KEY}_before")
    return ({first["step"] - 1: before} if before is not None else {}) | curve


def training(records: Sequence[Mapping], window: int) -> Curve:
    """Step -> running mean of the training groups' reward."""
    steps = [record["step"] for record in records if record["reward_mean"] is not None]
    rewards = [record["reward_mean"] for record in records if record["reward_mean"] is not None]
    return dict(zip(steps, smooth(rewards, window)))


def average(curves: Sequence[Curve]) -> Curve:
    """The mean at the steps that every curve has."""
    shared = set.intersection(*(set(curve) for curve in curves))
    return {step: sum(curve[step] for curve in curves) / len(curves) for step in sorted(shared)}


def draw(axes, curves: dict[str, list[Curve]], title: str) -> None:
    """Single runs thin, each label's mean thick."""
    for (label, own), colour in zip(curves.items(), COLOURS * len(curves)):
        for curve in own:
            axes.plot(list(curve), list(curve.values()), color=colour, linewidth=0.8, alpha=0.35)
        mean = average(own)
        name = label if len(own) == 1 else f"{label} (mean of {len(own)})"
        axes.plot(list(mean), list(mean.values()), color=colour, linewidth=2.2, marker="o", markersize=3, label=name)
    finish_axes(axes, title, "step", None)
    axes.legend(frameon=False, loc="best", fontsize=9)


def main(argv: list[str] | None = None) -> int:
    """The command line program; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="LABEL=FOLDER", help="output folders of runs, several may share a label")
    parser.add_argument("--output", default="rewards.png", metavar="PATH", help="the picture (PNG)")
    parser.add_argument("--window", type=int, default=6, help="steps of the training reward's running mean")
    args = parser.parse_args(argv)
    if args.window < 1:
        parser.error(f"--window is at least 1, not {args.window}")
    try:
        runs = read_runs(args.runs)
    except ValueError as error:
        parser.error(str(error))
    evaluated = {label: [held_out(records) for _, records in own] for label, own in runs.items()}
    figure, (left, right) = start_figure()
    draw(left, evaluated, "Held-out reward")
    draw(right, {label: [training(records, args.window) for _, records in own] for label, own in runs.items()},
         f"Training reward, mean of {args.window} steps")
    save_figure(figure, args.output)
    for label, own in runs.items():
        for folder, records in own:
            curve = ", ".join(f"{step}: {reward:.3f}" for step, reward in held_out(records).items())
            print(f"{label:12} {folder}  {curve or 'not evaluated'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
