"""How long each phase of a step takes: capture, score, replay and so on; by the clock, and of this process's processors.

A phase inside another interrupts it: each second belongs to one phase, the innermost. Left out: devices (give `synchronize`
where work is asynchronous).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseClock:
    """Adds up `seconds` (wall clock) and `processor_seconds` (of all threads of this process) by phase.

    Args:
        synchronize: called wherever one phase gives way to another, so that queued device work counts where it was queued;
            for example torch.cuda.synchronize.
        on_switch: called with the name of the phase that runs from now on, None where none does; for example to show it.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None, on_switch: Callable[[str | None], None] | None = None):
        self.seconds: dict[str, float] = {}
        self.processor_seconds: dict[str, float] = {}
        self.current: str | None = None
        self._since = self._since_processor = 0.0
        self._synchronize, self._on_switch = synchronize, on_switch

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times what runs inside, also when it raises."""
        outer = self.current
        self._finish_queue()
        self._switch(name)
        try:
            yield
            self._finish_queue()
        finally:
            self._switch(outer)

    def _finish_queue(self) -> None:
        if self._synchronize is not None:
            self._synchronize()

    def _switch(self, name: str | None) -> None:
        now, processor, current = time.perf_counter(), time.process_time(), self.current
        if current is not None:
            self.seconds[current] = self.seconds.get(current, 0.0) + now - self._since
            spent = processor - self._since_processor
            self.processor_seconds[current] = self.processor_seconds.get(current, 0.0) + spent
        self.current, self._since, self._since_processor = name, now, processor
        if self._on_switch is not None:
            self._on_switch(name)
