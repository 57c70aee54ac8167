"""The Markdown page, from the JSON files of results alone: text, tables, plots."""

import os
from pathlib import Path

from benchmarks.page_parts import write_context_parallel, write_gpu, write_limits, write_optimizers, write_sync
from benchmarks.page_steps import collect_steps, write_bars, write_losses, write_step_tables
from benchmarks.results import ResultStore

INTRODUCTION = """# LongStraw beside the alternatives

Made by `benchmarks/run.sh` from results that it measured; `benchmarks/run.sh --page-only` makes it again.

One GRPO step on one prompt and a group of responses, all systems with equal weights, tokens, advantages and objective:

| system | what it is |
|---|---|
| exact | LongStraw, the exact gradient |
| exact_live | the same gradient with the graphs of all the prompt's chunks kept (`--live-chunks`): nothing is computed twice |
| response_only | LongStraw with the prompt state as a constant: **not the same gradient** |
| conventional, checkpointed | autograd over prompt + response on Megatron's modules, a response at a time; with recomputation of every layer |
| trl, trl_checkpointed | TRL's `GRPOTrainer` on transformers' model, its rollouts replaced by the given completions through `rollout_func` and so free; without and with recomputation (its default) |
| prefix_grouper, prefix_grouper_checkpointed | PrefixGrouper around transformers' attention: the prompt once, the group in one graph; without and with recomputation |

`tests/unit/benchmarks/test_equal_steps.py` holds that all but response_only have the same gradient and move the weights alike.
"""

METHOD = """## How it is measured

- Every measurement is a process of its own, forked from one that has imported every system's packages and holds no model, with
  one compute thread. It takes a short step first, then the measured one. At a point the systems take turns, round by round, so
  that what else the machine does meets all alike; a ratio is of two steps of one round, and a cell is the median of the rounds
  with smallest and largest in brackets. "(once)" is a single round: a step that takes long.
- *Processor seconds* are of all threads of the process: other load on the machine moves them far less than wall seconds.
- *Resident memory* is the peak in the step above what was resident at its start (weights, moments, libraries), freed memory
  having been given back to the system before. *Tensor storages* are the peak of bytes of live tensors that the step made, which
  no allocator or kernel workspace changes. Gradients count in both, weights and moments in neither; the same for all systems.
- Settings of the alternatives that differ from their defaults are those that a CPU needs, or that favour them: a micro-batch of
  one sequence, no reference model, no clipping; TRL's head workspace cut to the small vocabulary; PrefixGrouper's head on response
  tokens alone and its attention by torch's fused kernel. On a CPU TRL's head scores every position.
- What limits: exact and PrefixGrouper do the same attention arithmetic (the forward keeps its outputs for the backward), and exact
  takes each prompt token once more through the other layers, since it keeps none of their activations. PrefixGrouper copies
  the prompt's keys and values to each response and masks them, which exact does not. 1.5 times PrefixGrouper without
  recomputation is hardly to be had where attention's kernels are most of both: at 8,192 tokens 76 % of exact's processor time
  (7.1 of 9.3 s) and 81 % of PrefixGrouper's (8.8 of 10.9 s) by torch's profiler (`benchmarks/kernel_share.py`, once, the other core
  busy): at 1.5 times exact would have 0.2 s for all the rest. `exact_live` computes nothing twice, and is no faster here: on one core
  with small layers, writing and reading all chunks' activations takes about what computing them again takes.
- The longest prompt is searched with a limit on private memory (RLIMIT_DATA) set when the measured step begins.
"""


def write_page(results: Path, output: Path) -> None:
    """Write the page and its plots; the plots go to a folder beside the page with its name."""
    from benchmarks.plots import draw_all

    records = ResultStore(results).read_all()
    steps = collect_steps(records)
    limits = {
        key.rpartition("/")[2]: record["figures"]["longest_prompt"]
        for key, record in records.items() if key.startswith("limit/") and "longest_prompt" in record["figures"]
    }
    pictures = draw_all(steps, limits, output.with_suffix(""))
    lines = [INTRODUCTION, *write_machines(records)]
    lines += ["## The bars", "", *write_bars(steps)]
    lines += ["Where another system is faster than exact or takes less (its figure over that of exact):", "", *write_losses(steps)]
    lines += ["## Step time and peak memory", "", "`exact` in seconds or MB, the others as multiples of it.", ""]
    lines += _write_commands(records, "step/", "benchmarks/run.sh --parts step")
    lines += write_step_tables(steps)
    for title, path in pictures.items():
        lines += [f"![{title}]({os.path.relpath(path, output.parent)})", ""]
    for title, prefix, command, written in (
        ("Longest prompt in fixed memory", "limit/", "benchmarks/run.sh --parts limit", write_limits(records)),
        ("Context parallelism", "cp/", None, write_context_parallel(records)),
        ("Optimizer memory", "optimizer/", None, write_optimizers(records)),
        ("Weight sync", "sync/", None, write_sync(records)),
        ("One GPU", "gpu/", "benchmarks/run.sh --gpu", write_gpu(records)),
    ):
        lines += [f"## {title}", "", *_write_commands(records, prefix, command), *written]
    lines += [METHOD]
    output.write_text("\n".join(lines))


def write_machines(records: dict[str, dict]) -> list[str]:
    """Machine, versions and dates of the results; more than one where they differ."""
    found: dict[tuple, list[str]] = {}
    for record in records.values():
        found.setdefault(tuple(record["machine"].items()), []).append(record["date"])
    lines = ["## Machine", "", "| | |", "|---|---|"]
    for machine, dates in found.items():
        shown = "; ".join(f"{name} {value}" for name, value in machine)
        between = min(dates) if min(dates) == max(dates) else f"{min(dates)} to {max(dates)}"
        lines.append(f"| {between}, {len(dates)} measurements | {shown} |")
    return [*lines, ""]


def _write_commands(records: dict[str, dict], prefix: str, command: str | None) -> list[str]:
    """The command of a table: that of the whole part, or of each of its results."""
    commands = {record["command"]: None for key, record in records.items() if key.startswith(prefix)}
    if command is not None and commands:
        commands = {command: None}
    return ["Command: " + ", ".join(f"`{line}`" for line in commands), ""] if commands else []
