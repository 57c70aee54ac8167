"""Start a tool's own ranks on this machine: the tool's script again, under torchrun, once per rank.

A port is asked from the system, a failed rank ends the others, and the caller gets the exit code.
"""

import os
import subprocess
import sys
from collections.abc import Sequence

import torch

_CHILD = "LONGSTRAW_TOOL_RANK"


def is_rank() -> bool:
    """Whether this process is a rank that `run_ranks` started."""
    return os.environ.get(_CHILD) == "1"


def rank_environment() -> dict[str, str]:
    """The environment of a rank: one compute thread a rank and no compilation where there is no CUDA device."""
    environment = dict(os.environ)
    environment[_CHILD] = "1"
    if not torch.cuda.is_available():
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment.setdefault("TORCH_COMPILE_DISABLE", "1")
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    environment["PYTHONWARNINGS"] = "ignore"
    return environment


def run_ranks(script: str, arguments: Sequence[str], ranks: int) -> int:
    """Run `script` with `arguments` on `ranks` ranks and wait; returns the exit code. Standard output is the ranks'."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", script]
    process = subprocess.Popen([*command, *arguments], env=rank_environment())
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
