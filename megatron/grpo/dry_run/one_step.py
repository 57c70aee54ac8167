"""One dry run, or one measured step, and its report."""

import time
from argparse import Namespace

import torch.distributed as dist

from longstraw.dry_run.report import describe_collectives, describe_memory, describe_times, describe_work
from longstraw.dry_run.search import Limits
from longstraw.dry_run.watch import Watch
from longstraw.receipts.collect import now_utc
from longstraw.receipts.receipt import write_receipt
from megatron.grpo.dry_run.flags import DryRun
from megatron.grpo.dry_run.receipt import build_receipt
from megatron.grpo.dry_run.run import run_fake_step, run_real_step


def report_step(dry: DryRun) -> dict:
    """Run the step, write its receipt where one is asked for, and describe it; a measured one by its rank that held most.
    Collective where it is measured."""
    started, at = time.perf_counter(), now_utc()
    ran = (run_real_step if dry.measure else run_fake_step)(dry.args, dry.config, dry.settings)
    watch = ran.watch
    if dry.receipt:
        receipt = build_receipt(
            dry.args, dry.config, watch, ran.facts, started=at, rank=dry.settings.rank, measured=dry.measure,
            decodes=dry.settings.decodes, hardware=dry.hardware if dry.settings.gpu and not dry.measure else None,
        )
        if receipt is not None:
            write_receipt(dry.receipt, receipt)
    report = describe(dry, watch) | {"wall_seconds": time.perf_counter() - started}
    if dry.measure:
        reports: list = [None] * dist.get_world_size()
        dist.all_gather_object(reports, report | {"rank": dist.get_rank()})
        report = max(reports, key=lambda one: one["peak_bytes"]["device"])
    return report | judge(report["peak_bytes"], dry.limits)


def judge(peaks: dict[str, int], limits: Limits) -> dict:
    """The limits that were given, and whether the peaks are within them: None without any."""
    given = {"device": limits.device, "host": limits.host}
    within = [peaks[place] <= limit for place, limit in given.items() if limit]
    return {"limits": given, "fits": all(within) if within else None}


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
