"""Parts of the page that are scripts of their own: context parallelism, optimizer memory, weight sync.

Each runs as a command, which the page shows; its JSON report is the result. Context parallelism of 1 and 2 takes turns.
"""

import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

from benchmarks.results import ResultStore

ROOT = Path(__file__).resolve().parent.parent


def run_script(script: str, flags: list[str], log: Path, seconds: float) -> dict:
    """The report of a benchmark script, or `error` where it failed; its output goes to the log."""
    with tempfile.TemporaryDirectory() as folder, open(log, "a") as file:
        report = Path(folder) / "report.json"
        command = [sys.executable, str(ROOT / "benchmarks" / script), *flags, "--json", str(report)]
        try:
            done = subprocess.run(
                command, stdout=file, stderr=file, timeout=seconds, cwd=ROOT,
                env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
            )
        except subprocess.TimeoutExpired:
            return {"error": f"took longer than {seconds:g} s"}
        if not report.exists():
            return {"error": f"ended with exit code {done.returncode}; see its log"}
        return json.loads(report.read_text())


def measure_script(args: Namespace, store: ResultStore, key: str, script: str, flags: str) -> None:
    """A script's report, kept."""
    log = store.path(key, ".log")
    command = f"benchmarks/{script} {flags}"
    store.measure(key, command, lambda: run_script(script, flags.split(), log, args.script_seconds), {"flags": flags})


def measure_context_parallel(args: Namespace, store: ResultStore) -> None:
    """An exact step on 1 and on 2 ranks, in turns."""
    for turn in range(args.repeat):
        for ranks in (1, 2):
            flags = (
                f"--model-preset {args.cp_model_preset} --runs exact --context-parallel-size {ranks} "
                f"--prompt-length {args.cp_prompt_length} --group-size {args.group_size} "
                f"--response-length {args.response_length} --repeat 1 --no-prompt-only "
                f"--measure {'both' if turn == 0 else 'time'}"
            )
            key = f"cp/{args.cp_model_preset}.p{args.cp_prompt_length}-g{args.group_size}-r{args.response_length}/{ranks}.{turn}"
            measure_script(args, store, key, "step.py", flags)


def measure_optimizers(args: Namespace, store: ResultStore) -> None:
    """Bytes of the optimizers' state."""
    measure_script(args, store, "optimizer/memory", "optimizer_memory.py", "--model-preset tiny-qwen3.6 --logra-rank 16 --lora-rank 16")


def measure_sync(args: Namespace, store: ResultStore) -> None:
    """Bytes and seconds of bringing an engine to the next weights; needs vLLM's environment (tools/setup_vllm.sh)."""
    measure_script(args, store, "sync/weights", "weight_sync.py", f"--model-preset {args.sync_model_preset}")
