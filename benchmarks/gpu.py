"""One GPU, at most 8 minutes: kernels against their rooflines, and an exact step at the longest prompt that fits.

    benchmarks/run.sh --gpu

The step is the training program's own (`benchmarks/live_step.py`): layers of Qwen3.6-27B's real widths, bfloat16, LoGRA. The
process may take --gpu-memory-gb of the device, so that the longest prompt is reached in seconds: lengths double until one does
not fit or time runs short, and half as much again as the last that fitted is tried once. Each length is a step with responses
that the policy samples; `peak_bytes` is the allocator's peak of live tensors in it. Beside it stands what tools/dry_run.py
predicts for the same flags and length (`peak_bytes` -> `device`).

Without a GPU the same code runs at the tiny sizes that tests give it, and counts tensor storages.
"""

import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.gpu_kernels import KernelSizes, find_hardware, measure_kernels
from benchmarks.results import ResultStore
from longstraw.memory_meter import StorageMeter

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 450
"""Of everything; the rest of the 8 minutes is start and end."""


@dataclass(frozen=True, kw_only=True)
class GpuPlan:
    """What is measured; the defaults are for a GPU."""

    kernels: KernelSizes = KernelSizes()
    flags: str = (
        "--model-preset qwen3.6-27b --num-layers 4 --bf16 --optimizer logra --logra-rank 64 --group-size 4 "
        "--max-response-length 64 --prompt-chunk-size 4096 --attention-output-residency host --lr 1e-6"
    )
    response_length: int = 64
    lengths: tuple[int, ...] = (65536, 131072, 262144, 524288)
    memory_gb: float = 20.0
    seconds: float = SECONDS
    dry_run_flags: tuple[str, ...] = field(default=())
    """Further flags of the dry run alone."""


def measure_gpu(results: Path, plan: GpuPlan | None = None) -> None:
    """Measure and keep the results; without a GPU and without a plan for the CPU, say so and end with exit code 1."""
    if plan is None and not torch.cuda.is_available():
        raise SystemExit("benchmarks: --gpu needs a GPU that PyTorch sees, and there is none")
    plan, store, ends = plan or GpuPlan(), ResultStore(results), time.monotonic() + (plan or GpuPlan()).seconds
    cuda = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if cuda else "cpu"
    hardware, device = find_hardware(name), "cuda" if cuda else "cpu"
    command = "benchmarks/run.sh --gpu"
    for kernel, figures in measure_kernels(plan.kernels, device, hardware).items():
        store.measure(f"gpu/{kernel}", command, lambda: {"device": name} | figures)
    steps = run_lengths(plan, plan.lengths, ends)
    fitting = [step for step in steps if "peak_bytes" in step]
    if fitting and len(steps) > len(fitting):
        steps += run_lengths(plan, (fitting[-1]["prompt_length"] * 3 // 2,), ends)
    for step in steps:
        store.measure(f"gpu/step_{step['prompt_length']}", command, lambda: {"memory_gb": plan.memory_gb} | step)
    fitting = [step for step in steps if "peak_bytes" in step]
    if fitting:
        longest = max(fitting, key=lambda step: step["prompt_length"])
        store.measure("gpu/longest", command, lambda: compare_with_dry_run(plan, longest))


def run_lengths(plan: GpuPlan, lengths: tuple[int, ...], ends: float) -> list[dict]:
    """Steps at each length in turn, in one process of its own, until one does not fit or time (monotonic) is short.

    Each has prompt_length, and seconds and peak_bytes, or `error`.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_lengths_in_child, args=(plan, lengths, ends - time.monotonic(), sender))
    process.start()
    sender.close()
    found: list[dict] = []
    try:
        while receiver.poll(max(0.0, ends - time.monotonic())):
            found.append(receiver.recv())
    except EOFError:
        pass
    finally:
        if process.is_alive() and time.monotonic() >= ends:
            process.kill()
        process.join()
    if not found or process.exitcode:
        tried = len(found)
        reason = "time was up" if time.monotonic() >= ends else f"the process ended with {process.exitcode}"
        found += [{"prompt_length": length, "error": reason} for length in lengths[tried : tried + 1]]
    return found


def _run_lengths_in_child(plan: GpuPlan, lengths: tuple[int, ...], seconds: float, sender) -> None:
    sys.path.insert(0, str(ROOT))
    from benchmarks.live_step import open_model, open_update

    ends, cuda = time.monotonic() + seconds, torch.cuda.is_available()
    if cuda:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, plan.memory_gb * 1e9 / total))
    meter = StorageMeter()
    with meter if not cuda else torch.enable_grad():
        live = open_update(open_model(plan.flags))
        for number, length in enumerate(lengths, start=1):
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            meter.peak_bytes = meter.live_bytes
            started = time.monotonic()
            try:
                group = live.sample_group(prompt_length=length, seed=number)
                live.accumulate(number, group)
                live.take(number, group)
            except torch.OutOfMemoryError:
                sender.send({"prompt_length": length, "error": "out of memory"})
                return
            if cuda:
                torch.cuda.synchronize()
            took = time.monotonic() - started
            peak = torch.cuda.max_memory_allocated() if cuda else meter.peak_bytes
            sender.send({"prompt_length": length, "seconds": took, "peak_bytes": peak})
            if time.monotonic() + 4.5 * took > ends:  # twice as long a prompt: four times the attention
                return


def compare_with_dry_run(plan: GpuPlan, longest: dict) -> dict:
    """The measured peak beside what the dry run says of the same step."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            sys.executable, str(ROOT / "tools" / "dry_run.py"), *plan.flags.split(), *plan.dry_run_flags, "--prompt-length",
            str(longest["prompt_length"]), "--response-length", str(plan.response_length), "--json", str(report),
        ]  # fmt: skip
        done = subprocess.run(command, stdout=sys.stderr, cwd=ROOT)
        if done.returncode:
            return longest | {"error": f"the dry run ended with exit code {done.returncode}"}
        predicted = json.loads(report.read_text())["peak_bytes"]["device"]
    return longest | {"predicted_peak_bytes": predicted, "measured_over_predicted": longest["peak_bytes"] / predicted}
