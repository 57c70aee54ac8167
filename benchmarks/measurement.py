"""One measurement of one system, and the process of its own that it is taken in.

`step`: one step after a short warm-up. Wall and processor seconds of the step; `rss_bytes`, the peak of resident memory in
the step above what was resident at its start, free memory having been given back to the system first. With `metered`, a
further step under a meter of tensor storages, `tensor_bytes`: their peak in the step, whatever the allocator does; those of
weights and moments were there before and do not count, gradients do.

`fit`: whether a step ends when the process may take only `limit_bytes` of private memory (RLIMIT_DATA) more than it had at
the step's start.

Every process is forked from a server that has imported all systems' packages and holds no model: all start from the same
memory. Left out: memory of a GPU (`benchmarks/gpu.py`).
"""

import ctypes
import multiprocessing
import os
import resource
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from benchmarks.systems import Setup, draw_centred, export_weights_of, run_steps, with_warm_up
from longstraw.memory_meter import StorageMeter

_KILOBYTE = 1024

NO_MEMORY = ("allocate memory", "not enough memory", "out of memory", "bad_alloc")
"""What torch and C++ say where an allocation fails."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one process does. kind: step, fit, or export (writes the weights' folder)."""

    kind: str
    setup: Setup
    folder: Path
    system: str = ""
    prompt_length: int = 0
    response_length: int = 0
    group_size: int = 0
    metered: bool = False
    limit_bytes: int = 0


def read_status(field: str) -> int:
    """Bytes of a line of /proc/self/status: VmRSS, VmHWM, VmData."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * _KILOBYTE
    raise ValueError(f"/proc/self/status has no {field}")


def give_back_memory() -> None:
    """Return freed memory to the system, and let VmHWM start again from what is resident."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


class _Timed:
    """Wall and processor seconds, and resident memory, of what runs inside."""

    def __init__(self, figures: dict):
        self.figures = figures

    def __enter__(self):
        give_back_memory()
        self.resident = read_status("VmRSS")
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def __exit__(self, *failure):
        self.figures |= {
            "seconds": time.perf_counter() - self.wall, "cpu_seconds": time.process_time() - self.cpu,
            "rss_bytes": read_status("VmHWM") - self.resident,
        }


class _Metered(StorageMeter):
    """A storage meter that leaves its peak among the figures."""

    def __init__(self, figures: dict):
        super().__init__()
        self.figures = figures

    def __exit__(self, *failure):
        super().__exit__(*failure)
        self.figures["tensor_bytes"] = self.peak_bytes


class _Limited:
    """At most so many bytes of private memory more than now."""

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes

    def __enter__(self):
        give_back_memory()
        most = read_status("VmData") + self.limit_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))

    def __exit__(self, *failure):
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


class _Open:
    def __enter__(self):
        return self

    def __exit__(self, *failure):
        return None


def perform(work: Work) -> dict:
    """Do the work in this process; returns its figures."""
    figures: dict = {}
    if work.kind == "export":
        export_weights_of(work.setup, work.folder)
        return figures
    batch = draw_centred(work.setup, work.prompt_length, work.response_length, work.group_size)
    if work.kind == "fit":
        inside = [_Open(), _Limited(work.limit_bytes)]
    else:
        inside = [_Open(), _Timed(figures), *[_Metered(figures)] * work.metered]
    batches = with_warm_up(batch, len(inside) - 1)
    run_steps(work.system, work.setup, work.folder, batches, lambda number: inside[number])
    return figures


def _perform_in_child(work: Work, sender, log: str) -> None:
    """The child: everything that is printed goes to the log; the figures, or the failure's sentence, to the parent."""
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        sender.send(perform(work))
    except (RuntimeError, MemoryError) as failure:
        traceback.print_exc()
        if not (isinstance(failure, MemoryError) or any(words in str(failure) for words in NO_MEMORY)):
            raise
        sender.send({"error": "out of memory"})


_PRELOADED = [
    "benchmarks.measurement", "benchmarks.trl_update", "benchmarks.prefix_grouper_update", "transformers.models.llama",
    "megatron.grpo.model_provider", "longstraw.sweeps",
]  # fmt: skip


def open_server():
    """The context whose processes are forked from a server with all packages imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def measure_in_process(context, work: Work, log: Path, seconds: float) -> dict:
    """Do the work in a process of its own and wait; returns its figures, or `error` where it failed or time was up.

    log: file that its output is appended to. Raises nothing about the work itself: a measurement that was not is a result.
    """
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_perform_in_child, args=(work, sender, str(log)))
    process.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            return {"error": f"took longer than {seconds:g} s"}
        try:
            return receiver.recv()
        except EOFError:
            process.join()
            return {"error": f"ended with exit code {process.exitcode}; see its log"}
    finally:
        receiver.close()
        if process.is_alive():
            process.join(30 if sys.exc_info()[0] is None else 0)
        if process.is_alive():
            process.kill()
        process.join()
