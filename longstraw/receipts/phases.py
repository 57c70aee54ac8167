"""How long each phase of a step takes: capture, score, replay and so on.

Left out: nested phases (each second belongs to one phase) and devices (give `synchronize` where work is asynchronous).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseClock:
    """Adds up wall-clock seconds by phase.

    Args:
        synchronize: called at both ends of a phase, so that queued device work counts where it was queued; for example
            torch.cuda.synchronize.
        on_enter: called with each phase's name as it starts; for example RunConsole.show_phase.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None, on_enter: Callable[[str], None] | None = None):
        self.seconds: dict[str, float] = {}
        self.current: str | None = None
        self._synchronize, self._on_enter = synchronize, on_enter

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times what runs inside, also when it raises. Raises ValueError when another phase is running."""
        if self.current is not None:
            raise ValueError(f"phase {name} starts inside phase {self.current}")
        if self._on_enter is not None:
            self._on_enter(name)
        if self._synchronize is not None:
            self._synchronize()
        self.current = name
        started = time.perf_counter()
        try:
            yield
            if self._synchronize is not None:
                self._synchronize()
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
            self.current = None
