"""A command to run for a role, and its run under a keeper."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from longstraw.rollout.topology import keeper
from longstraw.rollout.topology.processes import MARK, Process, read_process


@dataclass(frozen=True, kw_only=True)
class Command:
    """What one role runs on one host."""

    arguments: tuple[str, ...]
    """The program and its arguments."""

    log: Path
    """Takes standard output and standard error; appended to."""

    environment: Mapping[str, str]
    """All variables of the program's environment."""

    grace_seconds: float = 20.0
    """How long it may take to end once asked to."""

    scratch: tuple[Path, ...] = ()
    """Files and folders that must be gone before it starts, and after it."""


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class KeptCommand:
    """A command that runs, or has run, under a keeper."""

    def __init__(self, command: Command, mark: str, temporary: Path):
        """Starts it, with `temporary` as its folder of temporary files.

        Must be called in the process's main thread, whose end is the command's. Raises OSError.
        """
        for path in command.scratch:
            remove(path)
        command.log.parent.mkdir(parents=True, exist_ok=True)
        with open(command.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", keeper.__file__, str(os.getpid()), *command.arguments],
                env=dict(command.environment) | {MARK: mark, "TMPDIR": str(temporary)}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )
        self.command = command
        self.identity: Process | None = read_process(self.process.pid)
        self._deadline: float | None = None

    @property
    def status(self) -> int | None:
        """None while it runs; then its exit status, 128 + n for signal n."""
        status = self.process.poll()
        return 128 - status if status is not None and status < 0 else status

    def ask_to_end(self) -> None:
        """Ask once; `grace_seconds` later it is killed by `enforce`."""
        if self.status is None and self._deadline is None:
            self._deadline = time.monotonic() + self.command.grace_seconds
            self.process.send_signal(signal.SIGTERM)

    def enforce(self) -> None:
        """Kill the command and what is below it where its time is up."""
        if self.status is None and self._deadline is not None and time.monotonic() > self._deadline:
            self.process.send_signal(signal.SIGINT)
            self._deadline = float("inf")
