"""How a process and everything below it ends, leaving nothing: no orphan, no port, no shared-memory file.

The shared-memory files that a tree of processes has mapped are looked up while it lives, and removed once it is dead: those
of a killed process stay otherwise.

Left out: descendants whose parent died before them, which no longer belong to the tree; a worker asks the kernel to die
with its parent (`die_with_parent`).
"""

import ctypes
import os
import select
import signal
from collections.abc import Iterable
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_SHARED = "/dev/shm/"


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, which it does now if that has happened already.

    parent: its pid, as it told it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for_end(owner: int, asked: int) -> str:
    """Block until this process is to end; returns why.

    owner: the pid of the process that it serves, or 0. asked: a file descriptor that becomes readable at the end.
    """
    watched = [asked]
    if owner:
        try:
            watched.append(os.pidfd_open(owner))
        except ProcessLookupError:
            return f"its owner, process {owner}, is gone"
    readable, _, _ = select.select(watched, [], [])
    return "asked to" if asked in readable else f"its owner, process {owner}, is gone"


def end_tree(processes: Iterable[psutil.Process], *, grace: float) -> None:
    """End processes and all their descendants: SIGTERM, `grace` seconds later SIGKILL; remove their shared memory.

    Returns when all are gone. Python's resource trackers, which would only complain of what is removed here, go last.
    """
    tree = _with_descendants(processes)
    shared = list_shared_files(tree)
    trackers = [process for process in tree if _is_tracker(process)]
    others = [process for process in tree if process not in trackers]
    for process in others:
        _signal(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(others, timeout=grace)
    rest = [*_with_descendants(alive), *trackers]
    shared |= list_shared_files(rest)
    for process in rest:
        _signal(process, signal.SIGKILL)
    psutil.wait_procs(rest)
    remove_files(shared)


def remove_files(paths: Iterable[Path]) -> None:
    """Remove files; those that are gone already do not matter."""
    for path in paths:
        path.unlink(missing_ok=True)


def list_shared_files(processes: Iterable[psutil.Process]) -> set[Path]:
    """Files under /dev/shm that processes have mapped; of a process that is gone, none."""
    found = set()
    for process in processes:
        try:
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        except OSError:
            continue
        found |= {_SHARED + line.partition(_SHARED)[2] for line in lines if _SHARED in line}
    return {Path(path) for path in found if not path.endswith(" (deleted)")}


def _with_descendants(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    found = {}
    for process in processes:
        try:
            found |= {one.pid: one for one in (process, *process.children(recursive=True))}
        except psutil.NoSuchProcess:
            continue
    return list(found.values())


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        pass
