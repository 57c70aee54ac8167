"""What a dry run watches while a step runs: memory by phase, and operations weighted by how often a sampled piece repeats.

Left out: what a phase is. The engine's are `capture` (the prompt forward), `score` (responses forward), `responses` (their
replay) and `prompt_reverse`; the trainer's are its own.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from longstraw.dry_run.counter import OperationCounter
from longstraw.dry_run.shapes_only import ShapesOnly
from longstraw.dry_run.tracker import MemoryTracker

BLOCK_PHASES = {"capture", "score", "decode", "responses", "prompt_reverse"}
"""Phases whose unnamed tensors are a block's graph."""


class Watch:
    """A tracker, and its counter of operations if it has one, told of the same phases.

    A tracker of shapes may not be asked for an unknown integer within a block.
    """

    def __init__(self, tracker: MemoryTracker):
        self.tracker = tracker

    @property
    def counter(self) -> OperationCounter | None:
        """The tracker's."""
        return self.tracker.counter

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A stretch of the work."""
        default = "chunk_graph" if name in BLOCK_PHASES else "buffers"
        counting = nullcontext() if self.counter is None else self.counter.phase(name)
        with self.tracker.phase(name, default), counting, self._reading(name not in BLOCK_PHASES):
            yield

    @contextmanager
    def _reading(self, counts_faults: bool) -> Iterator[None]:
        if not isinstance(self.tracker, ShapesOnly):
            yield
            return
        before, self.tracker.counts_faults = self.tracker.counts_faults, counts_faults
        try:
            yield
        finally:
            self.tracker.counts_faults = before

    def standing_for(self, pieces: float) -> AbstractContextManager:
        """A block of work that is done once and stands for so many like it."""
        return nullcontext() if self.counter is None else self.counter.standing_for(pieces)
