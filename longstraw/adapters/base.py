"""The adapter protocol: what the sweeps ask of a layer kind.

An adapter is the sweep's view of one layer (it is keyed by Megatron's `layer_number`). It holds no state of a sweep: the
state is in the SegmentState, and what one block needs is in a run object, bound to the layer's module for the duration
of that block only.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from longstraw.attention.geometry import Exchange
from longstraw.attention.layout import BlockLayout
from longstraw.prompt_state.kept import KeptResidency
from longstraw.prompt_state.ledger import Ledger, LedgerEntry
from longstraw.prompt_state.pages import ArenaView
from longstraw.prompt_state.residency import Residency, Staging
from longstraw.segments import SegmentState

Key = int | tuple[str, int]
"""Names an adapter's state in a segment, and its run: the layer number of a mixer, ("router", number) of experts."""

Root = tuple[torch.Tensor, torch.Tensor]
"""A tensor of a block's graph and the gradient to start from there."""


class EndOfCapture(Exception):
    """Raised by the last layer of a block without loss once its state is captured: nothing after it is needed."""


@dataclass(frozen=True, kw_only=True)
class StatePolicy:
    """Where state lives, how it is watched, and what is exchanged, of how many rows at a time."""

    page_residency: Residency
    recurrent_state_residency: Residency
    index_page_residency: Residency
    adjoint_residency: Residency
    attention_output_residency: KeptResidency
    selection_residency: KeptResidency
    rows_at_once: int
    attention_exchange: Exchange
    staging: Staging
    ledger: Ledger


class LayerRun:
    """What a layer's module reads and leaves while one block runs; each adapter has its own kind.

    It holds tensors of the block's graph: no autograd node may hold it, or the graph is never freed.
    """

    layout: BlockLayout
    stop_here: bool
    auxiliary_loss: torch.Tensor | None = None  # this rank's share of a loss that the layer itself added


class LayerAdapter(Protocol):
    """One stateful module of a model: every layer's mixer (attention or another), and the router of each with experts."""

    layer_number: int
    key: Key
    module: torch.nn.Module

    def open(self, segment: SegmentState, policy: StatePolicy) -> object:
        """The layer's empty state for a segment (format, owner and residency of what will be stored)."""

    def foresee(self, segment: SegmentState, policy: StatePolicy, dtype: torch.dtype, *, stops: bool) -> list[LedgerEntry]:
        """What the layer's state of an opened segment will hold at its fullest, from shapes alone: nothing is allocated.

        dtype: of the activations. stops: this is the last layer of a segment that only leaves its state.
        """

    def restore(
        self, segment: SegmentState, block: int, policy: StatePolicy, *, replay: bool, stop_here: bool, live: bool = False
    ) -> LayerRun:
        """What the module reads to run a block from its boundary; with `replay`, leaves that take gradients.

        live: a replay that is the block's first pass, and leaves what `capture` stores.
        """

    def capture(self, run: LayerRun, segment: SegmentState, block: int) -> None:
        """Store what the module left after the forward sweep's pass over a block."""

    def prepare(self, segment: SegmentState) -> None:
        """Before anything that follows the segment's blocks is differentiated: open zero adjoints of its state."""

    def replay_roots(self, run: LayerRun, segment: SegmentState, block: int) -> list[Root]:
        """Where the backward of a replayed block starts, besides its loss: end states with their adjoints.

        The list depends on the structure of the tree only, never on what this rank owns: collectives must match.
        """

    def pass_adjoint(self, run: LayerRun, segment: SegmentState, block: int) -> None:
        """After the backward: hand the adjoint of the block's start to the block or segment before, and release."""

    def forget(self, segment: SegmentState, block: int) -> None:
        """Drop what only a reverse sweep would need of a block that has run (decoding needs its end alone)."""

    def select_batch(self, segment: SegmentState, index: torch.Tensor) -> None:
        """Keep the given members [b] of the segment's batch, in that order."""

    def partial_over_tp(self) -> list[torch.nn.Parameter]:
        """Parameters whose gradient on a rank is a partial sum that Megatron's finalization does not add over TP."""


def prefetch_pages(own: Sequence[ArenaView], following: Sequence[ArenaView]) -> None:
    """Start bringing the host pages of the layer that follows to the device.

    A layer's own are fetched first, since they are needed at once and must not make room for the others.
    """
    for view in own:
        if view.rows:
            view.arena.read(view.rows)
    for view in following:
        view.arena.prefetch(view.rows)


def prefetch_in_backward(output: torch.Tensor, own: Sequence[ArenaView], preceding: Sequence[ArenaView]) -> None:
    """`prefetch_pages` as the backward reaches a layer's attention output; preceding: of the layer before it, whose backward
    follows. The hook holds views of pages, nothing of the graph."""
    output.register_hook(lambda _grad: prefetch_pages(own, preceding))


@contextmanager
def bind(adapters: list[LayerAdapter], runs: dict[Key, LayerRun]) -> Iterator[None]:
    """Give each adapter's module its run; nothing stays bound after the block, also when it raises."""
    try:
        for adapter in adapters:
            adapter.module.run = runs[adapter.key]
        yield
    finally:
        for adapter in adapters:
            adapter.module.run = None
