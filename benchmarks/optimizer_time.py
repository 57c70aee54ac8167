"""Seconds of a step under LoGRA against dense Adam, on the training program's own objects and the same replay.

    python benchmarks/optimizer_time.py --model-preset tiny-qwen3.6 --logra-rank 16 --json -

Each optimizer has a model of its own in this process, with equal weights, and both take the same steps on the same prompt
and responses in turns: a pair of steps is timed within seconds, so that a noisy machine disturbs both alike. The first pair
warms up and is not counted. `replay` is the gradient's accumulation; `update` all after it (sums, checks, probes, moving the
weights). The ratio is the median over pairs, its spread the smallest and largest pair. `cpu` is the same by the process's
processor seconds, which other processes disturb less; on a GPU it says nothing of the device.

LoGRA runs with the reference's two probed responses unless --kl-probe-responses says otherwise; "fixed" is the same without a
probe (--update-step-size update-ratio). Exit code 0 means that it was measured; it never judges.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.live_step import LiveStep, open_model, open_update  # noqa: E402
from longstraw.transaction.group import PromptGroup  # noqa: E402
from megatron.grpo.presets import get_preset  # noqa: E402
from megatron.grpo.quiet_logs import quiet_logs  # noqa: E402
from tools.tool_flags import check_at_least_1, check_report_path, check_seed  # noqa: E402
from tools.tool_reports import write_report  # noqa: E402


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The benchmark's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model-preset", default="tiny-qwen3.6", help="architecture, of layers that forward mode goes through")
    add("--logra-rank", type=int, default=16, help="rank of the sketches")
    add("--kl-probe-responses", type=int, default=2, help="responses that the probe reads")
    add("--prompt-length", type=int, default=2048, help="tokens of the prompt")
    add("--response-length", type=int, default=128, help="tokens of each response")
    add("--group-size", type=int, default=8, help="responses")
    add("--chunk-size", type=int, default=512, help="tokens of the prompt per chunk")
    add("--repeat", type=int, default=3, help="pairs of steps that count")
    add("--seed", type=int, default=1, help="of weights and tokens")
    add("--json", default="-", metavar="PATH", help="where the report goes; - is standard output")
    args = parser.parse_args(argv)
    names = ("logra_rank", "kl_probe_responses", "prompt_length", "response_length", "chunk_size", "repeat")
    check_at_least_1(parser, args, names)
    check_seed(parser, args.seed)
    check_report_path(parser, args.json)
    if args.group_size < 2:
        parser.error("--group-size is at least 2: responses are compared")
    try:
        get_preset(args.model_preset)
    except ValueError as unknown:
        parser.error(str(unknown))
    return args


def build_flags(args: argparse.Namespace) -> dict[str, str]:
    """The program's flags of each optimizer."""
    shared = (
        f"--model-preset {args.model_preset} --group-size {args.group_size} --max-response-length {args.response_length} "
        f"--prompt-chunk-size {args.chunk_size} --lr 1e-5 "
    )
    logra = f"{shared} --optimizer logra --logra-rank {args.logra_rank} "
    return {
        "adam": shared,
        "logra": f"{logra} --kl-probe-responses {args.kl_probe_responses}",
        "logra fixed": f"{logra} --update-step-size update-ratio",
    }


def time_step(live: LiveStep, group: PromptGroup, number: int) -> dict[str, float]:
    """Seconds of one step's parts. The prompt is captured in it, as where a step has several prompts."""
    group.state, group.old_logprobs = None, None
    clocks = (time.perf_counter, time.process_time)
    started = [clock() for clock in clocks]
    live.accumulate(number, group)
    _synchronize()
    replayed = [clock() for clock in clocks]
    live.take(number, group)
    _synchronize()
    ended = [clock() for clock in clocks]
    return {
        "replay": replayed[0] - started[0], "update": ended[0] - replayed[0], "step": ended[0] - started[0],
        "cpu": ended[1] - started[1],
    }


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(args: argparse.Namespace) -> dict:
    """All optimizers' seconds, and LoGRA's over Adam's."""
    live = {name: open_update(open_model(flags, seed=args.seed)) for name, flags in build_flags(args).items()}
    group = live["adam"].sample_group(prompt_length=args.prompt_length, seed=args.seed)
    seconds: dict[str, list[dict]] = {name: [] for name in live}
    for number in range(1, args.repeat + 2):
        for name, one in live.items():
            found = time_step(one, group, number)
            if number > 1:
                seconds[name].append(found)
    ratios = {name: compare(seconds[name], seconds["adam"]) for name in live if name != "adam"}
    return {"seconds": seconds, "over_adam": ratios}


def compare(ours: list[dict], theirs: list[dict]) -> dict[str, dict[str, float]]:
    """Part -> median, smallest and largest ratio over the pairs."""
    found = {}
    for part in ("replay", "step", "cpu"):
        ratios = [a[part] / b[part] for a, b in zip(ours, theirs, strict=True)]
        found[part] = {"median": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}
    return found


def main(argv: list[str] | None = None) -> int:
    """The command line program; returns the exit code."""
    args = parse_arguments(argv)
    quiet_logs()
    found = measure(args)
    for name, parts in found["over_adam"].items():
        shown = ", ".join(f"{part} {r['median']:.3f} ({r['lowest']:.3f} to {r['highest']:.3f})" for part, r in parts.items())
        print(f"{name} over adam: {shown}", file=sys.stderr, flush=True)
    settings = {key: value for key, value in vars(args).items() if key != "json"}
    write_report({"settings": settings} | found, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
