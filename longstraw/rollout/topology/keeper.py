"""Runs one command and ends with everything that it started; a small process of its own between switcher and command.

    python -I -S keeper.py PARENT COMMAND...

- SIGTERM is passed on to the command once; SIGINT kills it and everything below it.
- When PARENT (the process id that starts this) is gone, however it went, everything below is killed.
- When the command ends, what it leaves behind gets a second and is killed; the exit status is the command's, 128 + n
  for signal n.

Whatever loses its parent below here becomes this process's child (PR_SET_CHILD_SUBREAPER), so nothing slips away. If
this process is itself killed, the kernel kills the command, and what was below becomes the switcher's. Standard library
only; nothing else of the project is imported.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LINGER_SECONDS = 1.0
POLL_SECONDS = 0.5
KILL_SECONDS = 10.0
WATCHED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}
libc = ctypes.CDLL(None, use_errno=True)


def set_process_option(option: int, value: int) -> None:
    """prctl(2). Raises OSError."""
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def prepare_command() -> None:
    """In the command's process, before it becomes the command."""
    set_process_option(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def list_below(ancestor: int) -> list[int]:
    """Process ids below `ancestor` that run."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", errors="replace") as file:
                    state, parent = file.read().rpartition(")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state not in "ZX":
                parents[int(entry)] = int(parent)
    found, frontier = [], {ancestor}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier}
        found.extend(frontier)
    return found


def reap(command: subprocess.Popen) -> None:
    """Collects ended processes that became this one's, and the command itself through `command`."""
    command.poll()
    while True:
        try:
            # Looks without collecting: the command's own status belongs to `command`.
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None:
            return
        if ended.si_pid == command.pid:
            command.poll()
        else:
            os.waitpid(ended.si_pid, 0)


def kill_below(command: subprocess.Popen) -> None:
    """Kills everything below this process, and what that starts meanwhile."""
    deadline = time.monotonic() + KILL_SECONDS
    while (pids := list_below(os.getpid())) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.02)
        reap(command)


def keep(parent: int, arguments: list[str]) -> int:
    """Runs the command to its end; returns its exit status."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    set_process_option(PR_SET_CHILD_SUBREAPER, 1)
    set_process_option(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return 128 + signal.SIGKILL
    command = subprocess.Popen(arguments, start_new_session=True, preexec_fn=prepare_command)
    told = False
    while command.returncode is None:
        received = signal.sigtimedwait(WATCHED, POLL_SECONDS)
        if os.getppid() != parent or (received and received.si_signo == signal.SIGINT):
            kill_below(command)
            break
        if received and received.si_signo == signal.SIGTERM and not told:
            told = True
            command.terminate()
        reap(command)
    deadline = time.monotonic() + LINGER_SECONDS
    while list_below(os.getpid()) and time.monotonic() < deadline and os.getppid() == parent:
        time.sleep(0.02)
        reap(command)
    kill_below(command)
    status = command.returncode
    return 128 + signal.SIGKILL if status is None else 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(keep(int(sys.argv[1]), sys.argv[2:]))
