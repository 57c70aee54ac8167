"""What tensors are for, said where they are made, so that a tracker of memory can tell one use from another.

    with memory_scope("staging"):
        copy = page.clone()                 # counts as a staged copy, on the device

The innermost scope counts. Nobody watching, a scope costs half a microsecond and does nothing else. `longstraw.dry_run`
reads scopes at each allocation; what is made outside of any is what the phase makes by default (a block's graph).

Left out: what a tensor becomes later (`MemoryTracker.claim`).
"""

from contextlib import ContextDecorator
from typing import Literal

CATEGORIES = (
    "weights", "gradients", "optimizer", "reference", "prompt_state", "response_state", "adjoints", "staging", "chunk_graph",
    "logits", "buffers",
)
"""weights; gradients: buffers, sketches and the drawn words of A; optimizer: moments and masters; reference: the reference
policy's weights; prompt_state and response_state: pages, boundary states, kept outputs and selections; adjoints: their
gradients; staging: device copies of host pages, and sums on their way to the host; chunk_graph: activations and all else of a
block; logits: the vocabulary projection's; buffers: what ranks exchange, tokens, tables, and what an update needs for a
moment."""

Place = Literal["device", "host"]

_open: list[tuple[str | None, Place]] = [(None, "device")]


class memory_scope(ContextDecorator):
    """A block, or a function as a decorator, whose new tensors are of one category and place.

    None leaves what the scope around it says: no category, and the device, outside of all.
    """

    def __init__(self, category: str | None = None, place: Place | None = None):
        self.category, self.place = category, place

    def __enter__(self) -> "memory_scope":
        category, place = _open[-1]
        _open.append((self.category or category, self.place or place))
        return self

    def __exit__(self, *exc) -> None:
        _open.pop()


def current_scope() -> tuple[str | None, Place]:
    """Category and place of what is made now; None for no category."""
    return _open[-1]


def state_category(segment: str) -> str:
    """The category of a segment's state, by the segment's name."""
    return "prompt_state" if segment == "prompt" else "response_state"
