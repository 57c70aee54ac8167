"""Processes as Linux's /proc shows them: who is below whom, who belongs to a run, what memory they hold, how they are
ended.

A process is named by its id and the moment it started, since ids are given out again. To whom it belongs is asked in
three ways, for none sees all: the mark in its environment (programs that set their own title overwrite it), its session
(a program may open another), and the list of those that were seen below the run's processes (what started since the
last look is missing there).
"""

import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MARK = "LONGSTRAW_SWITCH_MARK"
"""The environment variable that a run's processes carry."""

SHARED_MEMORY = Path("/dev/shm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


@dataclass(frozen=True)
class Process:
    """One reading of /proc/PID/stat."""

    pid: int
    started: int
    """Clock ticks after the machine's start."""

    name: str
    parent: int
    session: int
    resident_bytes: int

    @property
    def key(self) -> tuple[int, int]:
        """What names it for good, as long as the machine runs."""
        return self.pid, self.started


def read_process(pid: int) -> Process | None:
    """The process of an id; None where there is none, or only the entry of an ended one that nobody has asked about."""
    try:
        head, _, tail = _read(pid, "stat").decode(errors="replace").rpartition(")")
    except _GONE:
        return None
    # The name stands in parentheses and may hold anything; the fields after it are numbered from the state, the third.
    fields = tail.split()
    if fields[0] in "ZX":
        return None
    return Process(
        pid=pid, started=int(fields[19]), name=head.partition("(")[2], parent=int(fields[1]), session=int(fields[3]),
        resident_bytes=int(fields[21]) * _PAGE_BYTES,
    )


def list_processes() -> dict[int, Process]:
    """Every process of the machine that runs, by id."""
    found = (read_process(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())
    return {process.pid: process for process in found if process is not None}


def list_descendants(ancestor: int, processes: dict[int, Process]) -> list[Process]:
    """Those below a process, itself left out."""
    found, frontier = [], {ancestor}
    while frontier:
        below = [process for process in processes.values() if process.parent in frontier]
        found += below
        frontier = {process.pid for process in below}
    return found


def read_boot_id() -> str:
    """Names the machine's current run: process ids and start times of another one mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def carries_mark(process: Process, mark: str) -> bool:
    """Whether the process was started with this mark in its environment."""
    try:
        environment = _read(process.pid, "environ")
    except (*_GONE, OSError):
        return False
    return f"{MARK}={mark}".encode() in environment.split(b"\0")


def list_shared_memory(process: Process) -> set[str]:
    """Paths below /dev/shm that a process has mapped or open."""
    folder, prefix, found = f"/proc/{process.pid}/fd", f"{SHARED_MEMORY}/", set()
    marked = os.fsencode(prefix)
    try:
        with open(f"/proc/{process.pid}/maps", "rb") as maps:  # thousands of lines, of which a few are wanted
            paths = [line.partition(marked)[2] for line in maps if marked in line]
        found |= {prefix + os.fsdecode(path.removesuffix(b"\n")) for path in paths}
        for descriptor in os.listdir(folder):
            try:
                target = os.readlink(f"{folder}/{descriptor}")
            except _GONE:
                continue
            if target.startswith(prefix):
                found.add(target)
    except _GONE:
        pass
    return {path for path in found if not path.endswith(" (deleted)")}


def _read(pid: int, name: str) -> bytes:
    """A file of a process's folder. Not by pathlib, which keeps each part of a path for good (CPython 3.12: interned strings are
    immortal): a switcher looks at every process of its machine for days."""
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()


def kill_processes(processes: Iterable[Process]) -> None:
    """SIGKILL to each, if it is still the same process."""
    for process in processes:
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        try:
            now = read_process(process.pid)
            if now is not None and now.key == process.key:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finally:
            os.close(descriptor)
