"""What tools/dry_run.py and the training program's --dry-run start: parse, run one rank's step, print and write the report."""

import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from longstraw.dry_run.report import (
    describe_collectives, describe_memory, describe_times, describe_work, tabulate_memory, tabulate_times,
)
from longstraw.dry_run.watch import Watch
from longstraw.durable_files import write_whole
from longstraw.receipts.console import format_seconds
from megatron.grpo.arguments import ArgumentErrors
from megatron.grpo.dry_run.flags import DryRun, parse_dry_run
from megatron.grpo.dry_run.run import run_fake_step, run_real_step
from megatron.grpo.quiet_logs import quiet_logs


def report_step(dry: DryRun) -> dict:
    """Run the step and describe it; a measured one by its rank that held most. Collective where it is measured."""
    started = time.perf_counter()
    watch = (run_real_step if dry.measure else run_fake_step)(dry.args, dry.config, dry.settings)
    report = describe(dry, watch) | {"wall_seconds": time.perf_counter() - started}
    if not dry.measure:
        return report
    reports: list = [None] * dist.get_world_size()
    dist.all_gather_object(reports, report | {"rank": dist.get_rank()})
    return max(reports, key=lambda one: one["peak_bytes"]["device"])


def describe(dry: DryRun, watch: Watch) -> dict:
    """The report: what was run, and what it held."""
    args: Namespace = dry.args
    tp, cp, ep = args.tensor_model_parallel_size, args.context_parallel_size, args.expert_model_parallel_size
    return {
        "model": args.model_preset, "semantics": dry.config.sweeps.semantics, "measured": dry.measure,
        "prompt_length": dry.settings.lengths.prompt, "response_length": dry.settings.lengths.response,
        "group_size": dry.config.objective.group_size, "ranks": dry.settings.ranks, "rank": dry.settings.rank,
        "topology": {"tensor": tp, "context": cp, "expert": ep, "data": dry.settings.ranks // (tp * cp)},
        "flags": list(dry.argv), "every_block": dry.settings.every_block,
        "collectives": describe_collectives(watch.counter),
    } | describe_memory(watch.tracker) | (
        {} if dry.measure or not dry.settings.gpu else {
            "work": describe_work(watch.counter), "seconds": describe_times(watch.counter),
        }
    )


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
    console.print(f"{'measured' if report['measured'] else 'dry run'} in {format_seconds(report['wall_seconds'])}")


def show_table(console: Console, title: str, rows: list[list[str]]) -> None:
    """Rows under their heading, the first of them."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="left" if name in ("phase", "limited by") else "right")
    for row in rows[1:]:
        table.add_row(*row)
    console.print(table)


def main(argv: Sequence[str] | None = None, description: str = "") -> int:
    """The command line program; returns the exit code: 0, or 2 for flags that cannot be run."""
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
    report = report_step(dry)
    if int(os.environ.get("RANK", 0)) == 0:
        show(report, Console(width=160, highlight=False, stderr=dry.json == "-"), dry.hardware)
        if dry.json:
            write_report(report, dry.json)
    if dry.measure:
        dist.destroy_process_group()
    return 0


def write_report(report: dict, path: str) -> None:
    """The report as JSON to a file, whole or not at all, or as all of standard output where the path is -."""
    text = json.dumps(report, indent=1) + "\n"
    if path == "-":
        print(text, end="", flush=True)
    else:
        write_whole(Path(path), text)
