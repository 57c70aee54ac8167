"""Measure LongStraw beside the alternatives, and write a Markdown page with tables and plots: what benchmarks/run.sh starts.

    benchmarks/run.sh                                 every part at the default sizes, page in docs/benchmarks.md
    benchmarks/run.sh --parts step --prompt-lengths 2048 8192 --output /tmp/page.md
    benchmarks/run.sh --page-only                     the page again, from the results that are there
    benchmarks/run.sh --gpu                           at most 8 minutes on one GPU

Parts: step (time and peak memory), limit (longest prompt in fixed memory), cp (context parallelism of 1 and 2), optimizer,
sync. Results are kept in --results, one JSON file a measurement: an interrupted run goes on where it was, and a result is
measured again when its file is deleted. Exit code 0 means that the page is written; a measurement that failed is in it.
"""

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PARTS = ("step", "limit", "cp", "optimizer", "sync")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The program's flags."""
    from benchmarks.points import PREFIX_GROUPER, SYSTEMS
    from tools.tool_flags import check_at_least_1, check_seed

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--parts", default=",".join(PARTS), help="which, comma-separated")
    add("--output", type=Path, default=ROOT / "docs" / "benchmarks.md", help="the page; plots go to a folder of its name")
    add("--results", type=Path, default=ROOT / "runs" / "benchmarks", help="folder of the measurements' JSON files")
    add("--page-only", action="store_true", help="measure nothing")
    add("--gpu", action="store_true", help="measure one GPU instead (benchmarks/gpu.py), at most 8 minutes")
    add("--systems", nargs="+", default=list(SYSTEMS), help="which are compared: " + ", ".join(SYSTEMS))
    add("--model-preset", default="tiny-llama", help="model of the parts step and limit; see megatron/grpo/presets/")
    add("--prompt-lengths", type=int, nargs="*", default=[2048, 8192, 32768, 65536], help="of step, at --group-size")
    add("--group-size", type=int, default=8, help="responses where prompts vary")
    add("--group-sizes", type=int, nargs="*", default=[2, 8, 32], help="of step, at --prompt-length")
    add("--prompt-length", type=int, default=1024, help="tokens of the prompt where groups vary")
    add("--response-length", type=int, default=128, help="tokens of each response")
    add("--chunk-size", type=int, default=1024, help="tokens of the prompt per chunk, of LongStraw")
    add("--repeat", type=int, default=3, help="rounds in which the systems take turns")
    add("--meter-under-seconds", type=float, default=30, help="of a shorter step the tensor storages are counted, in a step more")
    add("--once-over-seconds", type=float, default=90, help="a system that will take longer at a point is measured once")
    add("--skip-over-seconds", type=float, default=300, help="and one that will take longer than this, not at all")
    add("--measurement-seconds", type=float, default=900, help="wall time after which a measurement is given up")
    add("--script-seconds", type=float, default=1200, help="the same of a part that is a script of its own")
    add("--limit-mib", type=int, default=128, help="memory of the part limit, above weights and moments")
    add("--limit-group-size", type=int, default=4, help="responses in the part limit")
    add("--limit-from", type=int, default=1024, help="shortest prompt that the part limit tries")
    add("--limit-to", type=int, default=65536, help="longest")
    add("--cp-model-preset", default="tiny-qwen3.6", help="model of the part cp")
    add("--cp-prompt-length", type=int, default=16384, help="tokens of the prompt in the part cp")
    add("--sync-model-preset", default="smollm2-135m", help="model of the part sync; none counts by shape alone")
    add("--seed", type=int, default=1, help="of weights and tokens")
    args = parser.parse_args(argv)
    args.parts = args.parts.split(",")
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        parser.error(f"--parts {','.join(unknown)} is not known; known are {','.join(PARTS)}")
    unknown = [system for system in args.systems if system not in SYSTEMS]
    if unknown:
        parser.error(f"--systems {' '.join(unknown)} is not known; known are {' '.join(SYSTEMS)}")
    check_at_least_1(parser, args, (
        "group_size", "prompt_length", "response_length", "chunk_size", "repeat", "limit_mib", "limit_from",
        "cp_prompt_length",
    ))  # fmt: skip
    check_seed(parser, args.seed)
    if min(args.group_size, args.limit_group_size, *args.group_sizes) < 2:
        parser.error("--group-size, --group-sizes and --limit-group-size are at least 2: responses are compared")
    if min(args.prompt_length, args.limit_from, *args.prompt_lengths) < 2:
        parser.error("--prompt-length, --prompt-lengths and --limit-from are at least 2: a prompt's last token starts the responses")
    if args.page_only:
        return args
    from benchmarks.transformers_model import has_only_attention
    from megatron.grpo.presets import get_preset

    for name in (args.model_preset, args.cp_model_preset):
        try:
            get_preset(name)
        except ValueError as unfit:
            parser.error(str(unfit))
    hooked = [system for system in args.systems if system in PREFIX_GROUPER]
    if hooked and not has_only_attention(args.model_preset):
        parser.error(
            f"--systems {' '.join(hooked)} has a hook for attention alone, and --model-preset {args.model_preset} has other layers"
        )
    return args


def measure(args: argparse.Namespace) -> None:
    """Every part that was asked for, as far as there is no result yet."""
    from benchmarks import limit_part, script_parts, step_part
    from benchmarks.measurement import Work, measure_in_process, open_server
    from benchmarks.results import ResultStore
    from benchmarks.systems import Setup

    store = ResultStore(args.results)
    if {"step", "limit"} & set(args.parts):
        context, folder = open_server(), args.results / "weights" / f"{args.model_preset}-seed{args.seed}"
        if not (folder / "config.json").exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            work = Work(kind="export", setup=Setup(model_preset=args.model_preset, seed=args.seed), folder=folder)
            failed = measure_in_process(context, work, folder.parent / "export.log", args.measurement_seconds).get("error")
            if failed:
                raise SystemExit(f"benchmarks: the weights could not be exported: {failed} ({folder.parent / 'export.log'})")
        if "step" in args.parts:
            step_part.measure_steps(args, store, context, folder)
        if "limit" in args.parts:
            limit_part.measure_limits(args, store, context, folder)
    if "cp" in args.parts:
        script_parts.measure_context_parallel(args, store)
    if "optimizer" in args.parts:
        script_parts.measure_optimizers(args, store)
    if "sync" in args.parts:
        script_parts.measure_sync(args, store)


def main(argv: list[str] | None = None) -> int:
    """The command line program; returns the exit code."""
    args = parse_arguments(argv)
    if args.gpu:
        from benchmarks.gpu import measure_gpu

        measure_gpu(args.results)
    elif not args.page_only:
        started = time.perf_counter()
        measure(args)
        print(f"benchmarks: measured in {time.perf_counter() - started:.0f} s", file=sys.stderr)
    from benchmarks.page import write_page

    write_page(args.results, args.output)
    print(f"written to {args.output}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    sys.exit(main())
