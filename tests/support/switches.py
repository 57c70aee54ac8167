"""A switcher over `quick_sides` in a process of its own, watched and killed by a test."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from longstraw.rollout.topology.processes import MARK
from tests.support import quick_sides
from tests.support.ranks import REPOSITORY

POLL_SECONDS = 0.05


class Switch:
    """One host's switcher; started again after a kill."""

    def __init__(self, folder: Path, steps: int, *, rank: int = 0, place: tuple[str, ...] = (),
                 prefix: tuple[str, ...] = (), **settings):
        folder.mkdir(exist_ok=True)
        for name in ("ports", "shared-memory"):
            (folder / name).touch()
        self.folder, self.rank = folder, rank
        script = REPOSITORY / "tests/support/quick_switch.py"
        self.command = [*prefix, sys.executable, script, folder, str(steps), *place]
        self.environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "QUICK_SWITCH": json.dumps(settings)}
        self.output = folder / f"output-{rank}"
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start it, or start it again."""
        with open(self.output, "ab") as output:
            self.process = subprocess.Popen(
                self.command, env=self.environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL,
            )

    def lines(self) -> list[dict]:
        """The journal so far."""
        path = self.folder / "switch/journal.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def hold(self, phase: str, step: int) -> None:
        """Have the programs of a step stay in a phase once they come to it."""
        (self.folder / f"hold-{phase}-{step}").touch()

    def release(self, phase: str, step: int) -> None:
        """Let them go on."""
        (self.folder / f"hold-{phase}-{step}").unlink()

    def wait_for(self, event: str, state: str, step: int, seconds: float = 60) -> None:
        """Until the journal has a line of a state."""
        self.wait_until(lambda: any((line["event"], line.get("state"), line.get("step")) == (event, state, step)
                                    for line in self.lines()), f"{event} {state} of step {step}", seconds)

    def wait_until(self, condition, what: str, seconds: float = 60) -> None:
        """Until a condition holds, while the switcher runs."""
        deadline = time.monotonic() + seconds
        while not condition():
            text = self.output.read_text()
            if self.process.poll() is not None:
                assert condition(), f"the switcher ended with {self.process.returncode} before {what}\n{text}"
                return
            assert time.monotonic() < deadline, f"{what} did not come\n{text}"
            time.sleep(POLL_SECONDS)

    def wait(self, seconds: float = 120) -> int:
        """Its exit status."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the switcher did not end\n{self.output.read_text()}") from None

    def find(self, role: str, which: str) -> psutil.Process | None:
        """The keeper, main, first or second process of a role; the first is the main one's first child."""
        try:
            for keeper in psutil.Process(self.process.pid).children():
                words = keeper.cmdline()
                if "keeper.py" not in " ".join(words) or role not in words:
                    continue
                if which == "keeper":
                    return keeper
                main = keeper.children()[0]
                below = sorted(main.children(), key=lambda process: process.pid)
                return main if which == "main" else below[0 if which == "first" else 1]
        except (psutil.NoSuchProcess, IndexError):
            pass
        return None

    def kill(self, *targets: str) -> None:
        """SIGKILL to "switcher", or to "trainer keeper" and the like, all together, once they are there."""
        self.wait_until(lambda: self._find_all(targets) is not None, f"{targets}", 30)
        # A file that is younger than a tick of the switcher it cannot know: no more than that is promised.
        self.wait_until(lambda: self.shared_memory() <= self.recorded(), "the record of shared memory", 30)
        assert self.try_to_kill(*targets), targets

    def try_to_kill(self, *targets: str, seconds: float = 0.0) -> bool:
        """SIGKILL to all of them together, where they all are there within some seconds; whether they were."""
        deadline = time.monotonic() + seconds
        while (found := self._find_all(targets)) is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        if "switcher" in targets:  # it does not see the others die before it
            self.process.send_signal(signal.SIGSTOP)
        for process in found:
            process.send_signal(signal.SIGKILL)
        if "switcher" in targets:
            self.process.wait(30)
        return True

    def _find_all(self, targets: tuple[str, ...]) -> list | None:
        found = [self.process if target == "switcher" else self.find(*target.split(maxsplit=1)) for target in targets]
        return None if None in found else found

    def shared_memory(self) -> set[str]:
        """The files in /dev/shm that the programs have made and that are there."""
        return {name for name in (self.folder / "shared-memory").read_text().split() if os.path.exists(name)}

    def recorded(self) -> set[str]:
        """Those that the switcher has written down."""
        return set(json.loads((self.folder / f"switch/node-{self.rank}.json").read_text())["shared_memory"])

    def marked(self) -> Iterator[psutil.Process]:
        """The processes of this run that are alive, wherever they hang."""
        mark = (self.folder / f"switch/node-{self.rank}.mark").read_text().strip()
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                    yield process
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue

    def wait_for_nothing(self, seconds: float = 30) -> None:
        """Until no process of the run is left."""
        deadline = time.monotonic() + seconds
        while left := list(self.marked()):
            assert time.monotonic() < deadline, left
            time.sleep(0.05)

    def end(self) -> None:
        """End whatever is left, at the end of a test that may have failed."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                pass
        for process in [*filter(None, [self.process]), *(self.marked() if (self.folder / f"switch/node-{self.rank}.mark").exists() else ())]:
            process.kill()
        if self.process is not None:
            self.process.wait()

    def rollouts(self) -> dict[str, str]:
        """The rollouts that lie on the disk."""
        return {path.name: path.read_text() for path in self.folder.glob("rollouts-*") if path.suffix != ".new"}

    def check_outcome(self, steps: int) -> None:
        """Every step was taken once, on the rollouts that are there, and nothing of the run is left."""
        state, rollouts = "initial", self.rollouts()
        for step in range(1, steps + 1):
            assert rollouts[f"rollouts-{step}"].endswith(f" by {state}"), f"step {step} was sampled by other weights"
            state = quick_sides.take_step(state, rollouts[f"rollouts-{step}"])
        assert quick_sides.read_checkpoint(self.folder) == {"step": steps, "state": state}
        assert (self.folder / f"version-{steps}").read_text() == state
        self.check_nothing_left()

    def check_nothing_left(self) -> None:
        """No process, shared memory, temporary file, open port or ready file."""
        assert list(self.marked()) == []
        mark = (self.folder / f"switch/node-{self.rank}.mark").read_text()
        assert not Path(tempfile.gettempdir(), f"longstraw-{mark[:12]}").exists()
        assert self.shared_memory() == set()
        assert not (self.folder / "ready.json").exists()
        for port in (self.folder / "ports").read_text().split():
            with socket.socket() as probe:
                assert probe.connect_ex(("127.0.0.1", int(port))) != 0, port
