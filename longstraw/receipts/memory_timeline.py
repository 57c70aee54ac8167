"""Memory over time: what this process holds, sampled at each change of phase and a few times a second between.

    timeline = MemoryTimeline()
    with timeline:                     # a thread samples from here on
        timeline.enter("replay")
        ...
    timeline.whole.moments, timeline.whole.peaks

Few moments are kept, evenly spread within a phase: of neighbours that become one it is the one that held more, so that peaks
stay.

Left out: a peak between two samples (`longstraw.memory_meter` has the whole step's).
"""

import threading
import time
from collections.abc import Callable
from types import TracebackType

from longstraw.receipts.host import read_resident_bytes
from longstraw.receipts.receipt import MemoryMoment

MOST_MOMENTS = 120
"""Moments that a track keeps."""

SECONDS_BETWEEN = 0.25

class Track:
    """Moments since a start, and the most bytes seen in each phase."""

    def __init__(self):
        self.started = time.perf_counter()
        self.peaks: dict[str, int] = {}
        self.moments: list[MemoryMoment] = []
        self._samples_a_moment, self._samples = 1, 0  # of the last moment

    def add(self, phase: str, size: int) -> None:
        """What was held, now and in this phase."""
        self.peaks[phase] = max(self.peaks.get(phase, 0), size)
        moment = MemoryMoment(seconds=time.perf_counter() - self.started, phase=phase, bytes=size)
        last = self.moments[-1] if self.moments else None
        if last is None or last.phase != phase or self._samples >= self._samples_a_moment:
            self.moments.append(moment)
            self._samples = 1
        else:
            self._samples += 1
            if size > last.bytes:
                self.moments[-1] = moment
        if len(self.moments) >= 2 * MOST_MOMENTS:
            self.moments = thin(self.moments)
            self._samples_a_moment *= 2


def thin(moments: list[MemoryMoment]) -> list[MemoryMoment]:
    """Of each two neighbours the one that held more; a single last one stays."""
    pairs = [moments[i : i + 2] for i in range(0, len(moments), 2)]
    return [max(pair, key=lambda moment: moment.bytes) for pair in pairs]


class MemoryTimeline:
    """Samples while it is entered. `whole` is of the run, `take_step` gives what came since it was asked last.

    read: bytes held now.
    """

    def __init__(self, read: Callable[[], int] = read_resident_bytes, *, seconds_between: float = SECONDS_BETWEEN):
        self.whole, self._step, self._phase = Track(), Track(), ""
        self._read, self._seconds_between = read, seconds_between
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "MemoryTimeline":
        self._ended.clear()
        self._thread = threading.Thread(target=self._sample_on, name="memory timeline", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def enter(self, phase: str | None) -> None:
        """Another phase runs from now on; None for none. What is held now belongs to both."""
        self.sample()
        self._phase = phase or ""
        self.sample()

    def sample(self) -> None:
        """Note what is held, where a phase runs."""
        with self._lock:
            if self._phase:
                size = self._read()
                self._step.add(self._phase, size)
                self.whole.add(self._phase, size)

    def take_step(self) -> Track:
        """What came since this was asked last."""
        with self._lock:
            taken, self._step = self._step, Track()
        return taken

    def _sample_on(self) -> None:
        while not self._ended.wait(self._seconds_between):
            self.sample()
