"""What tools/dry_run.py and the training program's --dry-run start: parse, run one rank's step, print and write the report."""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from longstraw.dry_run.hardware import HARDWARE
from longstraw.dry_run.report import GB, tabulate_memory, tabulate_times
from longstraw.durable_files import write_whole
from longstraw.receipts.console import format_seconds
from megatron.grpo.arguments import ArgumentErrors
from megatron.grpo.dry_run.fit import describe_fit, find_fit, show_way, tabulate_fit
from megatron.grpo.dry_run.flags import DryRun, parse_dry_run
from megatron.grpo.dry_run.one_step import report_step
from megatron.grpo.quiet_logs import quiet_logs

LEFT = ("phase", "limited by", "flags")
"""Columns of words."""


def show(report: dict, console: Console, machine: str) -> None:
    """The report as tables, its times on one machine."""
    cut = ", ".join(f"{name} {size}" for name, size in report["topology"].items() if size > 1) or "1 rank"
    console.print(
        f"{report['model']}, {report['semantics']}, {cut}: prompt {report['prompt_length']:,} + {report['group_size']} x "
        f"{report['response_length']:,}; rank {report['rank']} of {report['ranks']}, GB of 10^9 bytes at each phase's peak"
    )
    for place in ("device", "host"):
        if not report["peak_bytes"][place]:
            continue
        show_table(console, place, tabulate_memory(report, place))
    if "seconds" in report:
        show_table(console, f"seconds on {machine}", tabulate_times(report, machine))
    if "seconds" in report or report["fits"] is not None:
        console.print(describe_room(report, machine))
    console.print(f"{'measured' if report['measured'] else 'dry run'} in {format_seconds(report['wall_seconds'])}")


def describe_room(report: dict, machine: str) -> str:
    """Whether the step fits into the limits that were given; without limits, what it leaves of a GPU."""
    peaks, limits = report["peak_bytes"], report["limits"]
    if not any(limits.values()):
        memory = HARDWARE[machine].memory
        return (
            f"{machine}: the driver shows {memory / GB:.1f} GB, of which this leaves {(memory - peaks['device']) / GB:.1f} for what a "
            "dry run cannot see (docs/dry_run.md)"
        )
    parts = [f"{peaks[place] / GB:.6g} of {limit / GB:.6g} GB on the {place}" for place, limit in limits.items() if limit]
    return f"{'fits' if report['fits'] else 'DOES NOT FIT'}: {', '.join(parts)}"


def show_table(console: Console, title: str, rows: list[list[str]]) -> None:
    """Rows under their heading, the first of them."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="left" if name.startswith(LEFT) else "right", overflow="fold")
    for row in rows[1:]:
        table.add_row(*row)
    console.print(table)


def main(argv: Sequence[str] | None = None, description: str = "") -> int:
    """The command line program; returns the exit code: 0, 1 where the step or all that --fit tries does not fit the given limits,
    or 2 for flags that cannot be run."""
    quiet_logs()
    argv = list(sys.argv[1:] if argv is None else argv)
    if int(os.environ.get("RANK", 0)) and "--measure" not in argv:
        return 0  # under torchrun one process is enough
    try:
        dry = parse_dry_run(argv, description)
    except ArgumentErrors as errors:
        for sentence in errors.sentences:
            print(f"dry_run: error: {sentence}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"dry_run: error: {error}", file=sys.stderr)
        return 2
    if dry.fit is not None:
        return search(dry)
    report = report_step(dry)
    if int(os.environ.get("RANK", 0)) == 0:
        show(report, Console(width=160, highlight=False, stderr=dry.json == "-"), dry.hardware)
        if dry.json:
            write_report(report, dry.json)
    if dry.measure:
        dist.destroy_process_group()
    return 1 if report["fits"] is False else 0


def search(dry: DryRun) -> int:
    """--fit: search, show all that was tried and the winner's flags; returns the exit code: 0, or 1 where nothing fits."""
    console = Console(width=160, highlight=False, stderr=dry.json == "-")
    progress = Console(highlight=False, stderr=True)
    started = time.perf_counter()
    try:
        found = find_fit(dry, dry.fit, progress.print)
    except ValueError as error:
        print(f"dry_run: {error}", file=sys.stderr)
        return 1
    show_table(console, "tried; * wins, - does not fit", tabulate_fit(found, dry.fit, dry.hardware))
    show(found.best.report, console, dry.hardware)
    prompt = ["--prompt-length", str(found.best.prompt)]
    console.print(f"found in {format_seconds(time.perf_counter() - started)}: {' '.join([*show_way(found.best.way), *prompt])}")
    if dry.json:
        write_report(describe_fit(found, dry.fit), dry.json)
    return 0


def write_report(report: dict, path: str) -> None:
    """The report as JSON to a file, whole or not at all, or as all of standard output where the path is -."""
    text = json.dumps(report, indent=1) + "\n"
    if path == "-":
        print(text, end="", flush=True)
    elif Path(path).exists() and (Path(path).is_symlink() or not Path(path).is_file()):
        Path(path).write_text(text)  # a device, a pipe or a link: written to, never replaced
    else:
        write_whole(Path(path), text)
