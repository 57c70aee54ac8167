"""The state machine: from state to state until the last step's weights are written, and back where one fails.

`states` says which state follows and which one a disk asks for, `stages` what each runs and when it is over. Here are
deadlines, the journal, ways back and signals.
"""

import resource
import time
from collections.abc import Callable

from longstraw.rollout.topology.config import DeadlineConfig
from longstraw.rollout.topology.crew import Crew, StageFailed
from longstraw.rollout.topology.hosts import StopAsked
from longstraw.rollout.topology.journal import Journal
from longstraw.rollout.topology.stages import STAGES, Job
from longstraw.rollout.topology.states import State, choose_state, explain_loss, follow_state

TICK_SECONDS = 0.1


class GaveUp(RuntimeError):
    """The run cannot go on. refused: since a program refuses its flags."""

    def __init__(self, text: str, *, refused: bool = False):
        super().__init__(text)
        self.refused = refused


class Machine:
    """Runs a job on its hosts.

    signals: how many signals have come in; the first asks for an orderly end, the second for one at once.
    """

    def __init__(
        self, job: Job, crew: Crew, journal: Journal, deadlines: DeadlineConfig, *, signals: Callable[[], int],
        say: Callable[[str], None],
    ):
        self.job, self.crew, self.journal, self.deadlines = job, crew, journal, deadlines
        self.signals, self.say = signals, say

    def run(self) -> None:
        """To the end of the last step.

        Raises GaveUp after too many failures in a row, or where devices stay full; StopAsked once a signal has been
        followed; HostLost; ValueError where the disk lacks what the journal tells of.
        """
        self._clear("what an earlier switcher left")
        progress, failures = self.job.read_progress(), 0
        loss = explain_loss(self.journal.read(), progress)
        if loss:
            raise ValueError(f"{loss}: bring it back, or remove {self.journal.path} to go on from what there is")
        place = choose_state(progress, self.job.last_step)
        while place is not None:
            problem = self._pass_through(*place)
            if problem is None:
                place = follow_state(*place, self.job.last_step)
                continue
            self._clear(str(problem))
            before, progress = progress, self.job.read_progress()
            failures = failures + 1 if before == progress else 1
            if problem.hopeless:
                raise GaveUp(f"{place[0].value} of step {place[1]} cannot be run: {problem}", refused=True)
            if failures >= self.deadlines.attempts:
                raise GaveUp(f"{place[0].value} of step {place[1]} failed {failures} times in a row (--attempts): {problem}")
            place = choose_state(progress, self.job.last_step)

    def _pass_through(self, state: State, step: int) -> StageFailed | None:
        """Enter a state and wait for its end; returns why it failed, None where it did not."""
        stage, started, processes = STAGES[state](self.crew, self.job, step), time.monotonic(), {}
        deadline = self.deadlines.of(state)
        self.journal.write("enter", state=state.value, step=step)
        self.say(f"step {step}: {state.value}")
        try:
            stage.enter()
            while not stage.is_over():
                self._tick(state, step)
                processes |= self.crew.describe_processes()
                if time.monotonic() - started > deadline:
                    held = self.crew.describe_held()
                    raise StageFailed(
                        f"it took longer than the {deadline:g} s of --{state.value.replace('_', '-')}-seconds"
                        + (f" ({held})" if held else "")
                    )
            problem, processes = None, processes or self.crew.describe_processes()
        except StageFailed as failure:
            problem = failure
            self.say(f"step {step}: {state.value} failed: {problem}")
        line = {"state": state.value, "step": step, "seconds": round(time.monotonic() - started, 3), "processes": processes}
        if problem is not None:
            self.journal.write("failed", **line, reason=str(problem))
        else:
            self.journal.write("done", **line, memory=self.crew.describe_memory() | {"switcher": measure_own_memory()})
        return problem

    def _tick(self, state: State, step: int) -> None:
        """Let the hosts work, and follow a signal."""
        time.sleep(TICK_SECONDS)
        self.crew.tick()
        if self.signals() or self.crew.stop_asked():
            self._stop(state, step)

    def _stop(self, state: State, step: int) -> None:
        """End every program in an orderly way, clear everything and raise StopAsked."""
        self.say(f"step {step}: {state.value} is stopped by a signal; programs have {self.deadlines.grace_seconds:g} s to end")
        deadline = time.monotonic() + self.deadlines.grace_seconds
        ended = False
        while not ended and time.monotonic() < deadline and self.signals() < 2:  # a second one, also in the same tick
            try:
                ended = self.crew.end("trainer", "exporter", "generator") and self.crew.end("server") and self.crew.end("ray")
            except StageFailed as failure:
                self.say(str(failure))
                break
            time.sleep(TICK_SECONDS)
            self.crew.tick()
        self._clear("a signal")
        self.journal.write("stopped", state=state.value, step=step)
        raise StopAsked

    def _clear(self, reason: str) -> None:
        """Kill all that is left, everywhere. Raises GaveUp where something stays."""
        deadline = time.monotonic() + self.deadlines.draining_seconds
        self.crew.restart_clearing()
        try:
            while not self.crew.clear():
                if time.monotonic() > deadline:
                    raise StageFailed(f"devices are not empty after {self.deadlines.draining_seconds:g} s (--draining-seconds)")
                time.sleep(TICK_SECONDS / 2)
                self.crew.tick()
        except StageFailed as failure:
            held = self.crew.describe_held()
            raise GaveUp(f"{failure}: {held} (it was to be cleared after: {reason})") from None


def measure_own_memory() -> dict[str, int]:
    """This process's memory now and at its most, in bytes.

    Resident pages are anonymous ones, which only this process can give back, and those of files (its programs), which the
    kernel drops and reads again as it likes.
    """
    with open("/proc/self/statm") as file:
        pages, of_files = map(int, file.read().split()[1:3])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    page_bytes = resource.getpagesize()
    return {"resident_bytes": pages * page_bytes, "anonymous_bytes": (pages - of_files) * page_bytes, "peak_bytes": peak}
