"""Run a script on several gloo ranks and wait: no fixed port, no orphan, one failed rank ends the others.

All scripts of a test process are forked from one server that has imported Megatron, and each forks its ranks: importing
costs more than most checks.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.support.fork_server import REPOSITORY, end_with_parent, run_script

__all__ = ["REPOSITORY", "fork_ranks", "join_world", "leave_world", "open_results", "run_forked", "run_on_ranks"]

_worlds = ""
"""In a rank: the path that its worlds' rendezvous files begin with, of this launch alone."""


def run_on_ranks(script: Path, ranks: int, scratch: Path, arguments: list[str] = (), *, seconds: float = 580) -> str:
    """Run `script RANKS RENDEZVOUS [arguments]`, which calls `fork_ranks`; returns its output.

    Raises AssertionError with the output where a rank fails or time is up.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        return run_forked(script, [str(ranks), f"{folder}/rendezvous", *arguments], scratch, seconds=seconds)


def run_forked(script: Path, arguments: list[str], scratch: Path, *, seconds: float = 580) -> str:
    """Run `script [arguments]` in a process that has imported Megatron; returns its output. Raises as `run_on_ranks`."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        output = Path(folder) / "output"
        status = run_script([str(script), *map(str, arguments)], output, seconds)
        text = output.read_text(errors="replace")
    command = f"{script.name} {' '.join(map(str, arguments))}"
    assert status is not None, f"{command} did not end in {seconds} s\n{text[-6000:]}"
    assert status == 0, f"{command}: exit code {status}\n{text[-6000:]}"
    return text


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
    global _worlds
    import torch

    from longstraw.patches.gloo_device import share_gloo_device

    end_with_parent()
    torch.set_num_threads(1)
    share_gloo_device()
    _worlds = rendezvous
    join_world("first", rank, ranks)
    main(rank, ranks, arguments)
    leave_world()


def join_world(name: str, rank: int, ranks: int) -> None:
    """Enter the gloo world of all ranks of this launch. A name is used once: a world may leave its rendezvous file behind."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{_worlds}-{name}", rank=rank, world_size=ranks)


def leave_world() -> None:
    """Leave it once all have entered it: a rank that leaves earlier fails those that still connect to it."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
