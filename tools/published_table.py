"""The published receipts of response-only training at millions of tokens, beside dry runs of the same shapes here, as Markdown.

    .venv/bin/python tools/published_table.py --results runs/published_table > table.md
    .venv/bin/python tools/published_table.py --results runs/published_table --only "qwen3.6-27b 2M, G=8"

Each dry run takes minutes and leaves its report in --results; one that is there already is not run again. Published: peak GB of
the largest of 8 H20 ranks and seconds of a step, LoRA, gradient of the responses only. Ours: peaks of tensors on the largest
rank (docs/dry_run.md says what a dry run cannot see), and bound and estimate of a step on H20, without decoding.
"""

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from longstraw.durable_files import write_whole  # noqa: E402
from megatron.grpo.dry_run.apart import run_apart  # noqa: E402
from megatron.grpo.dry_run.flags import parse_dry_run  # noqa: E402
from megatron.grpo.dry_run.one_step import report_step  # noqa: E402
from megatron.grpo.quiet_logs import quiet_logs  # noqa: E402

HARDWARE = "H20"

QWEN = """--model-preset qwen3.6-27b --bf16 --context-parallel-size 8 --page-residency host --prompt-chunk-size 6144
    --response-block-size 4096 --max-response-length 8192 --response-length 8192"""
EXACT = "--adjoint-residency host --attention-output-residency host --recurrent-state-residency host"
GLM = """--model-preset glm-5.2 --bf16 --context-parallel-size 32 --expert-model-parallel-size 32 --page-residency host
    --index-page-residency host --prompt-chunk-size 4096 --response-block-size 1024 --query-rows-at-once 64
    --max-response-length 8192 --response-length 8192"""
GLM_EXACT = "--adjoint-residency host --selection-residency host"
LORA, LOGRA = "--lora-rank 16", "--optimizer logra --logra-rank 256"
GLM_LOGRA = f"{LOGRA} --logra-master-residency host --kl-probe finite-difference"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model, its prompt, and what was published of it. exact, logra: further flags of exact gradients and of LoGRA."""

    flags: str
    prompt: int
    group: int
    published_gb: float | None = None
    published_seconds: float | None = None
    exact: str = EXACT
    logra: str = LOGRA

    def command(self, way: str) -> list[str]:
        """The dry run of one of WAYS."""
        semantics, optimizer = way.split(", ")
        words = self.flags.split() + (self.logra if optimizer == "LoGRA" else LORA).split()
        words += ["--semantics", semantics, *(self.exact.split() if semantics == "exact" else [])]
        positions = max(self.prompt + 8192, 2_097_152)
        words += ["--prompt-length", str(self.prompt), "--group-size", str(self.group), "--rollout-elsewhere"]
        return [*words, "--max-position-embeddings", str(positions), "--hardware", HARDWARE]


WAYS = ("response_only, LoRA", "exact, LoRA", "exact, LoGRA")
SHAPES = {
    "qwen3.6-27b 2M, G=2": Shape(
        flags=QWEN, prompt=2_088_960, group=2, published_gb=97.503, published_seconds=5198.8
    ),
    "qwen3.6-27b 2M, G=8": Shape(
        flags=QWEN, prompt=2_088_960, group=8, published_gb=97.711, published_seconds=6785.2
    ),
    "qwen3.6-27b 4.46M": Shape(flags=QWEN, prompt=4_456_448 - 8192, group=2, published_gb=83.894),
    "glm-5.2 2M": Shape(flags=GLM, prompt=2_088_960, group=8, exact=GLM_EXACT, logra=GLM_LOGRA),
}


def find_reports(folder: Path, wanted: list[tuple[str, str]], jobs: int) -> dict[tuple[str, str], dict]:
    """The reports of these (shape, way), made where they are not there, so many at a time."""
    paths = {key: folder / (" ".join(key).replace(" ", "_").replace(",", "").replace("=", "") + ".json") for key in wanted}
    run_apart(lambda key: _make_report(key, paths[key]), [key for key in wanted if not paths[key].exists()], jobs=jobs)
    return {key: json.loads(path.read_text()) for key, path in paths.items()}


def _make_report(key: tuple[str, str], path: Path) -> None:
    name, way = key
    report = report_step(parse_dry_run(SHAPES[name].command(way)))
    write_whole(path, json.dumps(report, indent=1) + "\n")
    print(f"published_table: {name}, {way}: {report['wall_seconds']:.0f} s", file=sys.stderr, flush=True)


def make_memory_rows(reports: dict[tuple[str, str], dict]) -> list[list[str]]:
    """A row a shape: published GB, and ours on the device and on the host, way by way."""
    rows = [["GB (10^9) of the largest rank", "published", *(f"{way}: device / host" for way in WAYS)]]
    for name, shape in SHAPES.items():
        if any(shown == name for shown, _ in reports):
            ours = [_show_peaks(reports.get((name, way))) for way in WAYS]
            rows.append([name, f"{shape.published_gb:.3f}" if shape.published_gb else "-", *ours])
    return rows


def _show_peaks(report: dict | None) -> str:
    if report is None:
        return "not run"
    peak = report["peak_bytes"]
    return f"{peak['device'] / 1e9:.3f} / {peak['host'] / 1e9:.1f}"


def make_time_rows(reports: dict[tuple[str, str], dict]) -> list[list[str]]:
    """A row a dry run: seconds of the step, published and ours, and of its longest phases with what limits them."""
    rows = [[f"seconds on {HARDWARE}", "way", "published", "bound", "estimate", "the longest phases, and what limits them"]]
    for (name, way), report in reports.items():
        published = SHAPES[name].published_seconds
        phases = {phase: time for phase, time in report["seconds"][HARDWARE]["phases"].items() if phase != "decode"}
        bound, estimate = (sum(time[kind] for time in phases.values()) for kind in ("bound", "estimate"))
        longest = sorted(phases.items(), key=lambda item: -item[1]["estimate"])[:3]
        parts = "; ".join(
            f"{phase} {time['bound']:,.0f} to {time['estimate']:,.0f} ({time['limit']})" for phase, time in longest
        )
        shown = f"{published:,.1f}" if published else "-"
        rows.append([name, way, shown, f"{bound:,.0f}", f"{estimate:,.0f}", parts])
    return rows


def format_table(rows: list[list[str]]) -> str:
    """Markdown: a heading and its rows."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def main(argv: list[str] | None = None) -> int:
    """The command line program; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="folder of the reports, made if it is not there")
    parser.add_argument("--only", action="append", choices=tuple(SHAPES), help="shapes of the table (default: all)")
    parser.add_argument("--ways", action="append", choices=WAYS, help="ways to train them (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="dry runs at a time, of 1 to 2 GB each (default: %(default)s)")
    args = parser.parse_args(argv)
    quiet_logs()
    args.results.mkdir(parents=True, exist_ok=True)
    names, ways = args.only or SHAPES, args.ways or WAYS
    reports = find_reports(args.results, [(name, way) for name in names for way in ways], args.jobs)
    print(format_table(make_memory_rows(reports)), format_table(make_time_rows(reports)), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
