"""Append-only pages of one attention layer and one segment, in one buffer a rank.

The buffer is allocated once for all the tokens that this rank will own in the segment, so a block attends to all earlier
pages in one kernel call, and appending and releasing move one integer, the watermark. The adjoints have the same shape,
in float32 or wider, and their own residency.

A page is one row of each of the layer's tensors: keys and values, latents, or index keys (`longstraw.prompt_state.latents`
reads the latter two).

B batch, G key/value heads, N capacity in rows, D head dim (each tensor has its own).
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from longstraw.memory_scopes import memory_scope, state_category
from longstraw.prompt_state.ledger import LedgerEntry, storage_bytes
from longstraw.prompt_state.residency import Residency, Staging, bring, empty_resident, take_home, zeros_resident

PageKind = Literal["kv", "latent", "index"]

_arena_ids = itertools.count()


class PageArena:
    """The pages of one layer and segment on one rank: tensors [B, G, N, D], of which `rows` rows are in use.

    kind: what the pages are to the ledger: kv (k and v), latent or index (one tensor each).
    """

    def __init__(
        self, *, segment: str, layer_number: int, owner: int, capacity: int, residency: Residency,
        adjoint_residency: Residency, staging: Staging, kind: PageKind = "kv",
    ):
        self.id = next(_arena_ids)
        self.segment, self.layer_number, self.owner, self.capacity = segment, layer_number, owner, capacity
        self.residency, self.adjoint_residency, self._staging, self.kind = residency, adjoint_residency, staging, kind
        self.rows = 0
        self.tensors: tuple[torch.Tensor, ...] = ()
        self.adjoints: tuple[torch.Tensor, ...] = ()
        self._sums: tuple[torch.Tensor, ...] = ()

    @property
    def batch(self) -> int:
        """1, or the batch of the blocks that wrote the pages."""
        return self.tensors[0].shape[0] if self.tensors else 1

    @property
    def has_adjoints(self) -> bool:
        """Whether adjoints are open; equal on every rank."""
        return bool(self.adjoints)

    def append(self, *tensors: torch.Tensor) -> None:
        """Add this rank's tokens of a block: [B, G, M, D] each; M may be 0. Raises ValueError past the capacity."""
        if not self.tensors:
            with memory_scope(state_category(self.segment)):
                self.tensors = tuple(
                    empty_resident((*t.shape[:2], self.capacity, t.shape[3]), t.dtype, self.residency, t.device)
                    for t in tensors
                )
        end = self.rows + tensors[0].shape[2]
        if end > self.capacity:
            raise ValueError(f"layer {self.layer_number}: {end} rows do not fit into pages of {self.capacity}")
        for held, new in zip(self.tensors, tensors, strict=True):
            held[:, :, self.rows : end].copy_(new.detach())
        self.rows = end

    def release(self, rows: int) -> None:
        """Drop the pages after the first `rows` rows; their adjoints must have been read."""
        self.rows = rows
        self._staging.drop(self.id)

    def close_adjoints(self) -> None:
        """Free the adjoints; the pages stay."""
        self.adjoints = ()

    def read(self, rows: int) -> tuple[torch.Tensor, ...]:
        """The first `rows` rows of each tensor on the compute device; staged there if the pages live on the host."""
        parts = self._first(rows)
        return parts if self.residency == "device" else self._staging.fetch(self.id, rows, parts, self.layer_number)

    def prefetch(self, rows: int) -> None:
        """Start bringing the first `rows` rows to the device."""
        if self.residency == "host" and rows:
            self._staging.prefetch(self.id, rows, self._first(rows), self.layer_number)

    def _first(self, rows: int) -> tuple[torch.Tensor, ...]:
        return tuple(t[:, :, :rows] for t in self.tensors)

    def open_adjoints(self, device: torch.device) -> None:
        """Allocate zero adjoints for the pages; a second call does nothing. Empty pages have adjoints too.

        Raises ValueError for pages that no block has written.
        """
        if not self.tensors:
            raise ValueError(f"layer {self.layer_number}: no block has written the pages of segment {self.segment}")
        if not self.adjoints:
            with memory_scope("adjoints"):
                self.adjoints = tuple(
                    zeros_resident(t.shape, torch.promote_types(t.dtype, torch.float32), self.adjoint_residency, device)
                    for t in self.tensors
                )

    def add_adjoint(self, start: int, *grads: torch.Tensor) -> None:
        """Add gradients [B, G, n, D], one of each tensor, to the adjoints of the rows [start, start + n)."""
        for adjoint, grad in zip(self.adjoints, grads, strict=True):
            adjoint[:, :, start : start + grad.shape[2]] += take_home(grad, self.adjoint_residency, adjoint.device)

    @contextmanager
    def adding(self, rows: int, device: torch.device) -> Iterator[tuple[torch.Tensor, ...]]:
        """What to add to the adjoints of the first `rows` rows in place, [B, G, rows, D] each, on `device`.

        The adjoints themselves where they live there; else a sum that is added to them at the end.
        """
        if self.adjoint_residency == "device":
            yield tuple(t[:, :, :rows] for t in self.adjoints)
            return
        with memory_scope("staging", "device"):
            self._sums = tuple(torch.zeros_like(t[:, :, :rows], device=device) for t in self.adjoints)
        try:
            yield self._sums
            self.add_adjoint(0, *self._sums)
        finally:
            self._sums = ()

    def adjoint(self, start: int, end: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """The accumulated adjoints of rows [start, end), each [B, G, end - start, D], on `device`."""
        return tuple(bring(t[:, :, start:end], self.adjoint_residency, device) for t in self.adjoints)

    def select_batch(self, index: torch.Tensor) -> None:
        """Keep the given members of the batch, in that order (finished responses leave a decoding batch)."""
        self.tensors = tuple(t.index_select(0, index.to(t.device)) for t in self.tensors)
        self._staging.drop(self.id)

    def ledger_entries(self) -> list[LedgerEntry]:
        """The pages, their adjoints, their staged copies, and what is being summed for adjoints on the host."""
        held = [
            (f"{self.kind}_pages", self.residency, self.tensors),
            (f"{self.kind}_adjoint", self.adjoint_residency, self.adjoints),
            ("staged_adjoint", "device", self._sums),
        ]
        entries = [
            self._entry(kind, sum(map(storage_bytes, tensors)), residency) for kind, residency, tensors in held if tensors
        ]
        staged = self._staging.staged().get(self.id)
        return entries + ([self._entry("staged", staged, "device")] if staged is not None else [])

    def _entry(self, kind, bytes_, residency):
        return LedgerEntry(kind, self.segment, self.layer_number, self.owner, self.rows, bytes_, residency)


@dataclass(frozen=True)
class ArenaView:
    """The first rows of an arena, as a later block sees them.

    rows_of_ranks: how many every rank's arena has of them. rank: this one. constant: the block's backward leaves their
    adjoints alone (the prompt's pages under `response_only`).
    """

    arena: PageArena
    rows_of_ranks: tuple[int, ...]
    rank: int = 0
    constant: bool = False

    @property
    def rows(self) -> int:
        """How many this rank has."""
        return self.rows_of_ranks[self.rank]

    @property
    def batch(self) -> int:
        """1, or the batch of the blocks that wrote the pages."""
        return self.arena.batch


@dataclass(frozen=True)
class PageView(ArenaView):
    """A view of keys and values (`longstraw.attention.geometry.Pages`)."""

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(k, v) [B, G, rows, D] on the compute device."""
        return self.arena.read(self.rows)

    def add_adjoint(self, dk: torch.Tensor, dv: torch.Tensor, start: int = 0) -> None:
        """Add to the arena's adjoints of the rows from `start` on, unless they are constants."""
        if not self.constant:
            self.arena.add_adjoint(start, dk, dv)
