"""Receipts in one table, and their memory over steps and seconds by phase in one picture.

    .venv/bin/python tools/compare_receipts.py runs/exact runs/response_only --output comparison.png
    .venv/bin/python tools/compare_receipts.py runs/exact/receipts/step-000003.json dry_run.json

Each argument is a run's folder or a receipt file (of a run, of one step, of a dry run). What makes them different
computations is printed first: gradient semantics, staleness, measured or foreseen, model, weights, tokens, seed, and every
setting of objective, update and sampling. Of a receipt of several steps, seconds, tokens and exchanges are sums over the steps,
memory is the largest, and metrics are the last step's.
The columns beside each figure are its ratio to the first receipt's; where the semantics or the sources differ they are marked
as ratios of different things.

Exit code 0: compared. 2: a file that is no receipt, in one sentence.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.markup import escape  # noqa: E402
from rich.table import Table  # noqa: E402

from longstraw.receipts.compare import Row, Run, differ_in_meaning, find_differences, make_rows, open_receipts  # noqa: E402
from longstraw.receipts.compare_plot import plot_comparison  # noqa: E402


def build_table(runs: list[Run], rows: list[Row], *, marked: bool) -> Table:
    """A column for each receipt, and its ratio to the first. marked: the ratios are of different things."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for place, run in enumerate(runs):
        table.add_column(escape(run.name), justify="right", overflow="fold")
        if place:
            table.add_column("x, not the same thing" if marked else "x", justify="right")
    for row in rows:
        cells = [row.name, row.texts[0]]
        for text, ratio in zip(row.texts[1:], row.ratios[1:]):
            cells += [text, "" if ratio is None else f"{ratio:.4g}"]
        table.add_row(*map(escape, cells))
    return table


def main(argv: list[str] | None = None) -> int:
    """The command line program; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("receipts", nargs="+", metavar="PATH", help="run folders or receipt files; the first is compared with")
    parser.add_argument("--output", metavar="PNG", help="also draw memory over steps and seconds by phase")
    args = parser.parse_args(argv)
    if args.output and (Path(args.output).is_dir() or not Path(args.output).resolve().parent.is_dir()):
        parser.error(f"--output {args.output} must name a file in a folder that exists")
    try:
        runs = [open_receipts(path) for path in args.receipts]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    receipts = [run.receipt for run in runs]
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 60 + 50 * len(runs))
    marked = differ_in_meaning(receipts)
    for sentence in find_differences(receipts):
        console.print(sentence, markup=False, soft_wrap=True)
    if marked:
        console.print("The figures below are of different computations.", style="bold", markup=False)
    console.print(build_table(runs, make_rows(receipts), marked=marked))
    if args.output:
        plot_comparison(args.output, runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
