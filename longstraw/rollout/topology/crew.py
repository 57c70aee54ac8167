"""All hosts of a run together: start a role, see whether it runs, end it, clear everything.

Each question is answered from what every host said after its last order; until then the answer is "not yet".
"""

import os
from pathlib import Path
from typing import Literal

from longstraw.rollout.topology.hosts import Host
from longstraw.rollout.topology.node import NodeStatus, Order


REFUSED = 2
"""Exit status of a program for flags that cannot be run."""


_LAST_BYTES, _LAST_LINES, _LONGEST_WORDS = 1 << 16, 80, 500


class StageFailed(RuntimeError):
    """A state will not end well; the text says why. hopeless: it would fail in the same way again."""

    def __init__(self, text: str, *, hopeless: bool = False):
        super().__init__(text)
        self.hopeless = hopeless


class Crew:
    """The hosts of a run; the first is the leader's own, which serves and generates."""

    def __init__(self, hosts: list[Host]):
        self.hosts = hosts
        self._asked: set[tuple[str, str]] = set()
        self._clearing = False

    def tick(self) -> None:
        """A few times a second. Raises HostLost."""
        for host in self.hosts:
            host.tick()

    def start(self, role: str, step: int, where: Literal["first", "others", "all"], *, ports: tuple[int, ...] = ()) -> None:
        """Start a role on the first host, on the others, or on all."""
        self._clearing = False
        for host in {"first": self.hosts[:1], "others": self.hosts[1:], "all": self.hosts}[where]:
            self._asked.discard((host.name, role))
            host.order(Order(do="start", role=role, step=step, ports=ports))

    def statuses(self) -> list[NodeStatus] | None:
        """Every host's status, None while one has not answered. Raises StageFailed where one could not obey."""
        for host in self.hosts:
            if host.problem:
                raise StageFailed(f"{host.name} could not {host.problem}")
        found = [host.status() for host in self.hosts]
        return None if any(status is None for status in found) else found

    def runs(self, role: str) -> bool:
        """Whether the role runs on some host."""
        return any(role in status.roles and status.roles[role] is None for status in self.statuses() or [])

    def has_ended(self, role: str) -> bool:
        """Whether the role has ended, with status 0, on every host that it was started on. Raises StageFailed for
        another."""
        statuses = self.statuses()
        if statuses is None:
            return False
        for host, status in zip(self.hosts, statuses):
            if status.roles.get(role):
                raise _explain_end(host, status, role, "")
        return not self.runs(role)

    def require(self, *roles: str, goal: str) -> bool:
        """Whether the hosts have answered and the roles run wherever they were started.

        Raises StageFailed where one has ended, in whatever way.
        """
        statuses = self.statuses()
        for host, status in zip(self.hosts, statuses or []):
            for role in roles:
                if status.roles.get(role) is not None:
                    raise _explain_end(host, status, role, f" before {goal}")
        return statuses is not None

    def end(self, *roles: str) -> bool:
        """Ask the roles to end, once each; whether none of them runs any more."""
        for host, status in zip(self.hosts, self.statuses() or []):
            for role in roles:
                if role in status.roles and status.roles[role] is None and (host.name, role) not in self._asked:
                    self._asked.add((host.name, role))
                    host.order(Order(do="end", role=role))
        return self.statuses() is not None and not any(self.runs(role) for role in roles)

    def clear(self) -> bool:
        """Kill all that is left everywhere; whether every host is empty, its devices too."""
        if not self._clearing:
            self._clearing = True
            self._asked.clear()
            for host in self.hosts:
                host.order(Order(do="clear"))
        statuses = self.statuses()
        return statuses is not None and all(status.cleared for status in statuses)

    def restart_clearing(self) -> None:
        """Give the order anew when `clear` is next asked, whatever became of the one before."""
        self._clearing = False
        for host in self.hosts:
            host.problem = ""

    def describe_held(self) -> str:
        """What is still there, for people."""
        found = []
        for host in self.hosts:
            status = host.status()
            found += [f"{host.name} has not answered"] if status is None else [f"{host.name}: {e}" for e in status.held]
        return "; ".join(found)

    def describe_memory(self) -> dict[str, dict[str, int]]:
        """Host -> bytes held, for the journal."""
        return {
            host.name: {
                "resident_bytes": status.resident_bytes, "device_bytes": status.device_bytes,
                "shared_memory_bytes": status.shared_memory_bytes,
            }
            for host, status in zip(self.hosts, self.statuses() or [])
        }

    def describe_processes(self) -> dict[str, dict[str, list[int]]]:
        """Host -> role -> [process id, start time] of the keepers, for the journal."""
        return {host.name: status.processes for host, status in zip(self.hosts, self.statuses() or []) if status.processes}

    def stop_asked(self) -> bool:
        """Whether another host's switcher was signalled."""
        return any(host.stop_asked for host in self.hosts)


def _explain_end(host: Host, status: NodeStatus, role: str, when: str) -> StageFailed:
    code = status.roles[role]
    text = f"the {role} on {host.name} ended with status {code}{when}; its output is in {status.logs[role]}"
    last = find_last_words(Path(status.logs[role]))
    return StageFailed(text + (f" and says: {last}" if last else ""), hopeless=code == REFUSED)


def find_last_words(log: Path) -> str:
    """What a program that has failed said at its end: its last `error:`, after which launchers may have gone on; else its
    last line. "" where the log says nothing, or is not on a file system that this host shares."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()[-_LAST_LINES:] if line.strip()]
    except FileNotFoundError:
        return ""
    return next((line for line in reversed(lines) if ": error: " in line), lines[-1] if lines else "")[:_LONGEST_WORDS]
