"""Live bytes of tensors by category, place and phase: at each phase's peak, what held them.

Every storage that an operation makes counts from then until it is freed, once however many tensors view it, whether it holds
numbers or only a shape (`longstraw.dry_run.shapes_only`). What it is for is said where it is made (`longstraw.memory_scopes`) or afterwards by `claim`; a
storage that nobody names is the phase's default. A phase's events are kept until it ends and folded then, so a claim made
within the phase counts for all of it.

Bytes are those of the tensors. Left out: an allocator's rounding and fragmentation, memory inside a kernel, and what is made
while the tracker is not entered.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longstraw.dry_run.counter import OperationCounter
from longstraw.memory_scopes import Place, current_scope

PLACES: tuple[Place, ...] = ("device", "host")


@dataclass(eq=False, slots=True)
class Held:
    """One storage while it lives. real: whether it holds numbers. folded: whether an earlier fold has counted it."""

    size: int
    category: str
    place: Place
    real: bool = True
    folded: bool = False
    reference: weakref.ref | None = None


@dataclass
class Peak:
    """The most bytes of one place that a phase held, and of what."""

    bytes: int = 0
    categories: dict[str, int] = field(default_factory=dict)


class MemoryTracker(TorchDispatchMode):
    """`with MemoryTracker() as tracker:`; then `tracker.phases[name][place]` is that phase's Peak.

    Phases follow one another; one inside another interrupts it. `live` is {place: {category: bytes}} as it stands when the
    last phase ended. counter: under `ShapesOnly` is told of all operations.
    """

    def __init__(self):
        super().__init__()
        self.phases: dict[str, dict[Place, Peak]] = {}
        self.counter: OperationCounter | None = None
        self._held: dict[int, Held] = {}
        self._events: list[tuple[Held, int]] = []
        self._start: dict[Place, dict[str, int]] = {place: {} for place in PLACES}
        self._phase, self._default = "outside", "buffers"

    @property
    def live(self) -> dict[Place, dict[str, int]]:
        """Bytes by place and category now."""
        self._fold()
        return {place: {name: size for name, size in held.items() if size} for place, held in self._start.items()}

    @property
    def live_bytes(self) -> int:
        """Bytes of both places now."""
        return sum(held.size for held in self._held.values())

    @contextmanager
    def phase(self, name: str, default: str) -> Iterator[None]:
        """A stretch of the work. default: the category of what nobody names in it."""
        self._fold()
        before, (self._phase, self._default) = (self._phase, self._default), (name, default)
        try:
            yield
        finally:
            self._fold()
            self._phase, self._default = before

    def claim(self, tensors, category: str, place: Place | None = None) -> None:
        """Say what the storages of some tensors are for; those of none that is tracked are counted from now on."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            held = self._held.get(storage._cdata)
            if held is None:
                self.count(storage, category, place or "device")
                continue
            if held.folded:  # it stands in the sums that the present phase started from
                self._start[held.place][held.category] -= held.size
                into = self._start[place or held.place]
                into[category] = into.get(category, 0) + held.size
            held.category, held.place = category, place or held.place

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here: torch's guard around each call would cost as much as the call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = self.perform(func, args, kwargs or {})
        if isinstance(result, torch.Tensor):
            self._see(result)
        elif isinstance(result, (list, tuple)):
            self.see(result)
        return result

    def perform(self, func, args: tuple, kwargs: dict):
        """The operation's results; `ShapesOnly` has another way."""
        return func(*args, **kwargs)

    def see(self, tree) -> None:
        """Count tensors that no operation has returned."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)

    def hold_for_a_moment(self, size: int) -> None:
        """Count bytes that a kernel needs while it runs, beside its results."""
        held = Held(size, current_scope()[0] or self._default, "device")
        self._events += [(held, size), (held, -size)]

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        held = self._held.get(storage._cdata)
        if held is None:
            self.count(storage)
        elif held.size != (size := storage.nbytes()):  # an `out=` or resize_ has grown it
            self._events.append((held, size - held.size))
            held.size = size

    def count(
        self, storage: torch.UntypedStorage, category: str | None = None, place: Place | None = None, *, real: bool = True
    ) -> Held:
        """Count a storage from now on until it is freed; by default as the scopes around it say."""
        key, scope = storage._cdata, current_scope()
        held = Held(storage.nbytes(), category or scope[0] or self._default, place or scope[1], real)
        held.reference = weakref.ref(storage, partial(self._free, key))
        self._held[key] = held
        self._events.append((held, held.size))
        return held

    def _free(self, key: int, _reference: weakref.ref) -> None:
        held = self._held.pop(key)
        self._events.append((held, -held.size))

    def _fold(self) -> None:
        """Replay the events since the last fold, find their peaks, and start the next ones from where they end."""
        events, self._events = self._events, []
        total = {place: sum(self._start[place].values()) for place in PLACES}
        best, at = dict(total), dict.fromkeys(PLACES, 0)
        for number, (held, change) in enumerate(events, 1):
            place = held.place
            total[place] += change
            if total[place] > best[place]:
                best[place], at[place] = total[place], number
        peaks = self.phases.setdefault(self._phase, {place: Peak() for place in PLACES})
        running = {place: dict(self._start[place]) for place in PLACES}
        for number in range(len(events) + 1):
            if number:
                held, change = events[number - 1]
                by_category = running[held.place]
                by_category[held.category] = by_category.get(held.category, 0) + change
            for place in PLACES:
                if at[place] == number and best[place] > peaks[place].bytes:
                    found = {name: size for name, size in running[place].items() if size}
                    peaks[place] = Peak(best[place], found)
        for held, _ in events:
            held.folded = True
        self._start = running
