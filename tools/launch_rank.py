"""Starts one rank, passes signals on to it, and records how it ended; tools/launch.py puts it under torchrun.

torchrun gives the ranks that survive a failure 30 seconds to obey SIGTERM before it says that anything failed. A rank
that catches SIGTERM in order to save, and waits for a dead peer in a collective, uses all of them. So each rank gets
this small parent, which writes an exit status at the moment it happens. It imports neither torch nor the program.

    python launch_rank.py DIRECTORY COMMAND...     writes DIRECTORY/RANK.pid, then DIRECTORY/RANK.exit ("time status")

Under LONGSTRAW_LAUNCH_LOGS, a folder, every rank but its machine's first writes to a file of its own there.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
LOG_DIR = "LONGSTRAW_LAUNCH_LOGS"
libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Asks the kernel to kill this process as soon as the one that started it is gone, however that one went."""
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def write_whole(path: str, text: str) -> None:
    """Writes a file that a reader sees complete or not at all."""
    with open(path + ".new", "w") as file:
        file.write(text)
    os.replace(path + ".new", path)


def open_log() -> dict:
    """Where the rank's output goes, as subprocess takes it: nothing for the first rank of a machine, or without a folder."""
    folder = os.environ.pop(LOG_DIR, "")
    if not folder or os.environ["LOCAL_RANK"] == "0":
        return {}
    log = open(os.path.join(folder, f"rank-{int(os.environ['RANK']):05d}.log"), "ab")
    return {"stdout": log, "stderr": log}


def run_rank(directory: str, command: list[str]) -> int:
    """Runs `command` to its end; returns its exit status, 128 + n when signal n ended it."""
    record = os.path.join(directory, os.environ["RANK"])
    asked: list[int] = []
    child: subprocess.Popen | None = None

    def pass_on(signum: int, _frame) -> None:
        asked.append(signum)
        if child is not None and child.poll() is None:
            child.send_signal(signal.SIGTERM)

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, pass_on)
    die_with_parent()
    # A session of its own: torchrun signals this process's whole group, and the rank must get each signal once.
    child = subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_parent, **open_log())
    if asked:
        child.send_signal(signal.SIGTERM)
    write_whole(record + ".pid", str(os.getpid()))
    status = child.wait()
    status = 128 - status if status < 0 else status
    write_whole(record + ".exit", f"{time.time()} {status}")
    return status


if __name__ == "__main__":
    sys.exit(run_rank(sys.argv[1], sys.argv[2:]))
