"""Run a script on several gloo ranks and wait: no fixed port, no orphan, one failed rank ends the others.

The script imports once and forks its ranks: importing Megatron costs more than most checks.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def run_on_ranks(script: Path, ranks: int, scratch: Path, arguments: list[str] = (), *, seconds: float = 580) -> str:
    """Run `script RANKS RENDEZVOUS [arguments]`, which calls `fork_ranks`; returns its output.

    Raises AssertionError with the output where a rank fails or time is up.
    """
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1", "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore",
    }
    process = subprocess.Popen(
        [sys.executable, str(script), str(ranks), str(scratch / "rendezvous"), *arguments], env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY, start_new_session=True,
        preexec_fn=_end_with_parent,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"{script.name} on {ranks} ranks did not end in {seconds} s\n{output[-6000:]}") from None
    assert process.returncode == 0, f"{script.name} on {ranks} ranks: exit code {process.returncode}\n{output[-6000:]}"
    return output


def open_results(script: Path, cases: dict, arguments: list[str], tmp_path_factory) -> Callable[[str], dict]:
    """case name -> what the script found for it; each number of ranks is launched when first asked for.

    cases: by name, each with its `ranks`. The script gets a path to write {name: result} to as JSON, then `arguments`.
    """
    found: dict[int, dict] = {}

    def result_of(name: str) -> dict:
        ranks = cases[name].ranks
        if ranks not in found:
            scratch = tmp_path_factory.mktemp(f"ranks{ranks}")
            found[ranks] = {}  # a failed launch fails each of its cases at once
            run_on_ranks(script, ranks, scratch, [str(scratch / "results.json"), *arguments])
            found[ranks] = json.loads((scratch / "results.json").read_text())
        assert name in found[ranks], f"the launch of {ranks} ranks failed before this case"
        return found[ranks][name]

    return result_of


def fork_ranks(main: Callable[[int, int, list[str]], None]) -> None:
    """In the script: `main(rank, ranks, arguments)` in one forked process a rank, each in the gloo world of all."""
    import torch.multiprocessing

    ranks, rendezvous, arguments = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    sys.stdout.flush()
    torch.multiprocessing.start_processes(
        _enter, args=(main, ranks, rendezvous, arguments), nprocs=ranks, start_method="fork"
    )


def _enter(rank, main, ranks, rendezvous, arguments):
    import torch
    import torch.distributed as dist

    from longstraw.patches.gloo_device import share_gloo_device

    _end_with_parent()
    torch.set_num_threads(1)
    share_gloo_device()
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    main(rank, ranks, arguments)
    dist.barrier()
    dist.destroy_process_group()


def _end_with_parent() -> None:
    """Ask the kernel to end this process when the one that started it ends, however it ends (prctl(2))."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
