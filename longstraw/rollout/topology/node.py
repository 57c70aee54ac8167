"""One host's share of a switch: it runs commands by role, ends them, and says what is still held.

The leader gives orders, and reads the status; `channel` carries both to other hosts. Orders never carry a command: a
host builds its own from the flags that it was started with, so what comes in over a network can only be one of the
names below.

    {"do": "start", "role": "trainer", "step": 3, "ports": [41231]}
    {"do": "end", "role": "server"}      ask it to end; it is killed after its grace period
    {"do": "clear"}                      kill everything of this run on this host, remove its shared-memory files

What runs is written to a record file, so that a host whose switcher was killed ends what was left of it at the next
start.
"""

import json
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from longstraw.durable_files import write_whole
from longstraw.rollout.topology.command import Command, KeptCommand, remove
from longstraw.rollout.topology.devices import choose_devices, explain_use, read_devices
from longstraw.rollout.topology.processes import (
    SHARED_MEMORY, Process, carries_mark, kill_processes, list_descendants, list_processes, list_shared_memory, read_boot_id,
)

_NOT_LOOKED = ["not looked at yet"]
ROLES = ("trainer", "exporter", "generator", "server", "sync", "ray")
OBSERVE_SECONDS = 1.0
DEVICE_SECONDS = 1.0
NEW_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a host is to do."""

    do: str
    role: str = ""
    step: int = 0
    ports: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError for anything but the orders there are."""
        fine = self.do in ("start", "end", "clear") and (self.role in ROLES if self.do != "clear" else self.role == "")
        numbers = (self.step, *self.ports)
        if not (fine and all(type(n) is int and 0 <= n < 2**31 for n in numbers) and len(self.ports) <= 16):
            raise ValueError(f"{self} is no order that a host takes")


@dataclass(frozen=True, kw_only=True)
class NodeStatus:
    """What a host says of itself."""

    roles: dict[str, int | None]
    """Role -> None while its command runs, then its exit status; roles started since the last clearing."""

    held: list[str]
    """What is still there of this run, a clause each; asked and answered only while the host is being cleared."""

    cleared: bool = False
    """Whether the host has been cleared since anything was started on it."""

    processes: dict[str, list[int]]
    """Role -> [process id, start time] of its keeper."""

    logs: dict[str, str]
    """Role -> the file of its output."""

    resident_bytes: int = 0
    """Of all processes of this run on this host."""

    device_bytes: int = 0
    """Used on the visible GPUs; looked at while the host is being cleared."""

    shared_memory_bytes: int = 0
    """Used in /dev/shm, by whomever."""


class LocalNode:
    """This host.

    build: (role, step, ports) -> the command. mark: names the run on this host; two hosts of a run, or two runs on a
    host, have different ones. record: a file. adopts: this process has no children but those of the run, and is the
    subreaper of what loses its parent below it.
    """

    def __init__(
        self, *, build: Callable[[str, int, tuple[int, ...]], Command], mark: str, record: Path, adopts: bool = False
    ):
        self.build, self.mark, self.record, self.adopts = build, mark, record, adopts
        self.temporary = Path(tempfile.gettempdir(), f"longstraw-{mark[:12]}")
        self.commands: dict[str, KeptCommand] = {}
        self.visible = choose_devices(os.environ)
        self._seen: dict[tuple[int, int], str] = {}  # (pid, start) -> name, of whatever ran below us
        self._sessions: set[int] = set()
        self._shared: set[str] = set()  # files in /dev/shm that our processes made
        self._known: frozenset[str] = frozenset()  # names that stood there at the last look
        self._scratch: set[str] = set()
        self._baseline: dict[str, int] = {}
        self._clearing, self._cleared, self._held = False, False, _NOT_LOOKED
        self._before: dict[str, int] | None = None  # file in /dev/shm -> its number, of when nothing of ours ran
        self._observed = self._asked = 0.0
        self._resident_bytes, self._device_bytes, self._device_clauses = 0, 0, _NOT_LOOKED
        self._written = ""
        self._read_record()

    def obey(self, order: Order) -> None:
        """Carry out an order. Raises OSError where a program cannot be started, ValueError where no such thing can
        be."""
        if order.do == "clear":
            self._clearing, self._cleared, self._held, self._asked = True, False, _NOT_LOOKED, 0.0
        elif order.do == "end":
            if order.role in self.commands:
                self.commands[order.role].ask_to_end()
        else:
            running = self.commands.get(order.role)
            if running is not None and running.status is None:
                raise ValueError(f"the {order.role} runs already")
            if self._before is None:
                self._before = _number_files()
            self._clearing = self._cleared = False
            self._make_temporary()
            command = KeptCommand(self.build(order.role, order.step, order.ports), self.mark, self.temporary)
            self.commands[order.role] = command
            if command.identity is not None:
                self._seen[command.identity.key] = order.role
                self._sessions.add(command.identity.pid)
            self._scratch |= {str(path) for path in command.command.scratch}
            self._write_record()

    def _make_temporary(self) -> None:
        """The folder of temporary files of whatever is started until the next clearing."""
        if str(self.temporary) not in self._scratch:
            remove(self.temporary)
            self.temporary.mkdir(mode=0o700)
            self._scratch.add(str(self.temporary))
            self._write_record()

    def tick(self) -> None:
        """What has to be done now and then; a few times a second."""
        for command in self.commands.values():
            command.enforce()
        now = time.monotonic()
        if self._clearing:
            self._clear()
        elif self.commands and (now - self._observed > OBSERVE_SECONDS or set(os.listdir(SHARED_MEMORY)) - self._known):
            self._observed = now
            self._observe(self._find(list_processes()))

    def status(self) -> NodeStatus:
        """As of the last tick."""
        usage = os.statvfs(SHARED_MEMORY)
        return NodeStatus(
            roles={role: command.status for role, command in self.commands.items()},
            held=list(self._held) if self._clearing else [], cleared=self._cleared,
            processes={role: list(command.identity.key) for role, command in self.commands.items() if command.identity},
            logs={role: str(command.command.log) for role, command in self.commands.items()},
            resident_bytes=self._resident_bytes, device_bytes=self._device_bytes,
            shared_memory_bytes=(usage.f_blocks - usage.f_bfree) * usage.f_frsize,
        )

    def _find(self, processes: dict[int, Process]) -> list[Process]:
        """Whatever runs of this run on this host, in whichever way it is known (see `processes`)."""
        found = {process.pid: process for process in list_descendants(os.getpid(), processes)} if self.adopts else {}
        for process in processes.values():
            known = process.key in self._seen or process.session in self._sessions
            if process.pid not in found and (known or carries_mark(process, self.mark)):
                found[process.pid] = process
                found |= {below.pid: below for below in list_descendants(process.pid, processes)}
        found.pop(os.getpid(), None)
        return list(found.values())

    def _observe(self, ours: list[Process]) -> None:
        """Remember processes and shared memory, on the disk where there is something new."""
        self._look_at(ours)
        self._write_record()

    def _look_at(self, ours: list[Process]) -> None:
        """Remember processes and shared memory."""
        # `ours` has all that was known and runs: what has ended is forgotten.
        self._seen = {process.key: process.name for process in ours}
        self._sessions = {process.session for process in ours} - {os.getsid(0)}
        self._resident_bytes = sum(process.resident_bytes for process in ours)
        listed = os.listdir(SHARED_MEMORY)
        for process in ours:
            self._shared |= {path for path in list_shared_memory(process) - self._shared if self._is_ours(path)}
        # A file that was just made may not be mapped yet: its name counts as new for a while.
        self._known = frozenset(name for name in listed if not _is_younger(f"{SHARED_MEMORY}/{name}", NEW_SECONDS))

    def _is_ours(self, path: str) -> bool:
        """Whether a file in /dev/shm that our processes hold is one that they made: it lies at the top, as what
        libraries make there does, and was not there before them, which no clock is asked about. Folders there are the
        user's."""
        try:
            state = os.stat(path)
        except FileNotFoundError:
            return False
        folder, name = os.path.split(path)
        new = self._before is not None and self._before.get(name) != state.st_ino
        return folder == str(SHARED_MEMORY) and stat.S_ISREG(state.st_mode) and state.st_uid == os.getuid() and new

    def _clear(self) -> None:
        """One pass of killing and looking."""
        processes = list_processes()
        ours = self._find(processes)
        self._look_at(ours)
        kill_processes(ours)
        self._try_to_write_record()
        _reap_children({command.process.pid for command in self.commands.values()})
        held = [f"process {process.pid} ({process.name})" for process in ours]
        if not ours:
            for path in self._scratch | self._shared:
                remove(Path(path))
            held = [path for path in sorted(self._shared) if os.path.exists(path)] + self._look_at_devices()
        self._held = held
        if not held:
            for forgotten in (self._seen, self._sessions, self._shared, self._scratch, self.commands):
                forgotten.clear()
            self._clearing, self._cleared, self._before = False, True, None
            self._try_to_write_record()

    def _look_at_devices(self) -> list[str]:
        """One clause for each device that is not empty. The lowest use ever seen in between is what empty means."""
        if self.visible == ():
            return []
        if time.monotonic() - self._asked > DEVICE_SECONDS:
            try:
                devices = read_devices(self.visible)
            except RuntimeError as error:  # asked again until the deadline of whoever waits for empty devices
                self._device_clauses = [str(error)]
                return self._device_clauses
            for device in devices:
                if not device.processes:
                    least = min(device.used_bytes, self._baseline.get(device.uuid, device.used_bytes))
                    self._baseline[device.uuid] = least
            self._device_bytes = sum(device.used_bytes for device in devices)
            self._device_clauses = explain_use(devices, self._baseline)
            self._asked = time.monotonic()
        return self._device_clauses

    def _try_to_write_record(self) -> None:
        """While everything is killed, a disk that is full or gone must not be in the way; the next start writes again,
        and fails where it still is."""
        try:
            self._write_record()
        except OSError:
            pass

    def _write_record(self) -> None:
        content = {
            "boot_id": read_boot_id(), "host": socket.gethostname(), "mark": self.mark, "baseline": self._baseline,
            "processes": sorted([*key, name] for key, name in self._seen.items()), "sessions": sorted(self._sessions),
            "shared_memory": sorted(self._shared), "before": self._before,
            "scratch": sorted(self._scratch),
        }
        text = json.dumps(content, indent=1) + "\n"
        if text != self._written:
            write_whole(self.record, text)
            self._written = text

    def _read_record(self) -> None:
        """Take up what an earlier switcher of this run on this host left; nothing where the machine has started
        anew."""
        if not self.record.exists():
            return
        content = json.loads(self.record.read_text())
        if content["boot_id"] != read_boot_id() or content["host"] != socket.gethostname():
            return
        self._baseline, self._before = content["baseline"], content.get("before")
        running = list_processes()
        self._seen = {
            (pid, started): name for pid, started, name in content["processes"]
            if pid in running and running[pid].key == (pid, started)
        }
        self._shared = {path for path in content["shared_memory"] if re.fullmatch(r"/dev/shm/.+", path)}
        self._scratch = set(content["scratch"])
        # A session's number is given to no other process while any of its members is there.
        keepers = {process.session for key in self._seen for process in [running[key[0]]]}
        self._sessions = {session for session in content["sessions"] if session in keepers}


def _number_files() -> dict[str, int]:
    """The files in /dev/shm by name, each with its number, which a file that takes the name later has not."""
    with os.scandir(SHARED_MEMORY) as entries:
        return {entry.name: entry.inode() for entry in entries}


def _is_younger(path: str, seconds: float) -> bool:
    try:
        return os.stat(path).st_ctime > time.time() - seconds
    except FileNotFoundError:
        return False


def _reap_children(kept: set[int]) -> None:
    """Collect ended processes that became ours when their own parents died; the keepers' status is asked elsewhere."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in kept:
            return
        os.waitpid(ended.si_pid, 0)
