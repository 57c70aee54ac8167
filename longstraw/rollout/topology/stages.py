"""What runs in each state, and when the state is over.

A stage is entered once, then asked `is_over` a few times a second; it raises StageFailed where it never will be.
Programs are asked before the disk is: one that wrote what it was to write, and then ended, has not failed.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from longstraw.rollout.topology.crew import Crew, StageFailed
from longstraw.rollout.topology.states import Progress, State

LOOK_SECONDS = 0.3
NO_WEIGHTS = -1


class Job(Protocol):
    """What is switched. Its methods are called a few times a second, and answer at once."""

    last_step: int
    uses_ray: bool

    def read_progress(self) -> Progress:
        """What lies on the disk now. Raises ValueError where that is nothing a run can go on from."""

    def choose_ports(self, role: str) -> tuple[int, ...]:
        """Ports that are free on the first host, for a role's programs on all hosts."""

    def ray_answers(self, ports: tuple[int, ...]) -> bool:
        """Whether Ray's head can be reached."""

    def server_version(self) -> int | None:
        """Version of the weights that the server serves, NO_WEIGHTS where it has none yet; None while it does not
        answer."""


class Stage(ABC):
    """One state, entered once."""

    state: State

    def __init__(self, crew: Crew, job: Job, step: int):
        self.crew, self.job, self.step = crew, job, step
        self._looked = 0.0

    def enter(self) -> None:
        """Start what the state runs."""

    @abstractmethod
    def is_over(self) -> bool:
        """Whether the next state may be entered. Raises StageFailed."""

    def progress(self) -> Progress:
        """What lies on the disk, read seldom enough for a file system over a network."""
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self._progress, self._looked = self.job.read_progress(), time.monotonic()
        return self._progress

    def progress_now(self) -> Progress:
        """What lies on the disk at this moment."""
        self._looked = 0.0
        return self.progress()


class Training(Stage):
    """The trainer takes one step, from the rollouts on the disk, and saves."""

    state = State.TRAINING
    role = "trainer"

    def enter(self) -> None:
        self.crew.start(self.role, self.step, "all", ports=self.job.choose_ports(self.role))

    def is_over(self) -> bool:
        return self._is_written(f"step {self.step} was committed", lambda found: found.committed >= self.step)

    def _is_written(self, goal: str, is_there: Callable[[Progress], bool]) -> bool:
        """Whether the disk has what the state is for."""
        try:
            answered = self.crew.require(self.role, goal=goal)
        except StageFailed:
            if is_there(self.progress_now()):
                return True
            raise
        return answered and is_there(self.progress())


class Exporting(Training):
    """The trainer writes the step's weights; where none runs, as after a restart, another program writes those of its
    checkpoint."""

    state = State.EXPORTING

    def enter(self) -> None:
        if not self.crew.runs("trainer") and not self.progress_now().exported:
            self.role = "exporter"
            super().enter()

    def is_over(self) -> bool:
        goal = f"the weights of step {self.step} were written"
        return self._is_written(goal, lambda found: found.committed >= self.step and found.exported)


class Draining(Stage):
    """The trainer ends by itself; then everything is cleared."""

    state = State.DRAINING
    _ended = False

    def is_over(self) -> bool:
        self._ended = self._ended or (self.crew.has_ended("trainer") and self.crew.has_ended("exporter"))
        return self._ended and self.crew.clear()


class RolloutUp(Stage):
    """Ray, where several hosts serve together, then the server, then a sync where the folder that it has loaded lacks
    updates, until it answers with the right weights."""

    state = State.ROLLOUT_UP
    _ports: tuple[int, ...] = ()
    _server_started = _sync_started = False

    def enter(self) -> None:
        if self.job.uses_ray:
            self._ports = self.job.choose_ports("ray")
            self.crew.start("ray", self.step, "first", ports=self._ports)
        else:
            self._start_server()

    def is_over(self) -> bool:
        if not self.crew.require("ray", "server", goal="the server answered"):
            return False
        if not self._server_started:
            if self.job.ray_answers(self._ports):
                self.crew.start("ray", self.step, "others", ports=self._ports)  # they look for the head at once
                self._start_server()
            return False
        if self._sync_started and not self.crew.has_ended("sync"):
            return False
        version = self.job.server_version()
        if version is None or version == self.step - 1:
            return version is not None
        if self._sync_started or version > self.step - 1:
            raise StageFailed(f"the server holds weights of version {version}, and step {self.step} needs {self.step - 1}")
        self._sync_started = True
        self.crew.start("sync", self.step, "first")
        return False

    def _start_server(self) -> None:
        self._server_started = True
        self.crew.start("server", self.step, "first", ports=self._ports)


class Generating(Stage):
    """The generator samples and scores the step's rollouts with the server."""

    state = State.GENERATING

    def enter(self) -> None:
        self.crew.start("generator", self.step, "first")

    def is_over(self) -> bool:
        if not self.crew.require("ray", "server", goal=f"the rollouts of step {self.step} were written"):
            return False
        if not self.crew.has_ended("generator"):
            return False
        if not self.progress_now().rolled_out:
            raise StageFailed(f"the generator ended with status 0 and left no rollouts of step {self.step}")
        return True


class RolloutDown(Stage):
    """The server ends, then Ray; then everything is cleared."""

    state = State.ROLLOUT_DOWN
    _ended = False

    def is_over(self) -> bool:
        self._ended = self._ended or (self.crew.end("server") and self.crew.end("ray"))
        return self._ended and self.crew.clear()


STAGES = {stage.state: stage for stage in (Training, Exporting, Draining, RolloutUp, Generating, RolloutDown)}
