"""Append-only keys and values of one attention layer and one segment, in one buffer a rank.

The buffer is allocated once for all the tokens that this rank will own in the segment, so a block attends to all earlier
pages in one kernel call, and appending and releasing move one integer, the watermark. The adjoints (dK, dV) have the
same shape, in float32 or wider, and their own residency.

B batch, G key/value heads, N capacity in rows, D head dim.
"""

import itertools
from dataclasses import dataclass

import torch

from longstraw.prompt_state.ledger import LedgerEntry, storage_bytes
from longstraw.prompt_state.residency import Residency, Staging, empty_resident, zeros_resident

_arena_ids = itertools.count()


class PageArena:
    """The pages of one layer and segment on one rank: k and v [B, G, N, D], of which `rows` rows are in use."""

    def __init__(
        self, *, segment: str, layer_number: int, owner: int, capacity: int, residency: Residency,
        adjoint_residency: Residency, staging: Staging,
    ):
        self.id = next(_arena_ids)
        self.segment, self.layer_number, self.owner, self.capacity = segment, layer_number, owner, capacity
        self.residency, self.adjoint_residency, self._staging = residency, adjoint_residency, staging
        self.rows = 0
        self.k = self.v = self.dk = self.dv = None

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Add this rank's tokens of a block: k and v [B, G, M, D]; M may be 0. Raises ValueError past the capacity."""
        if self.k is None:
            shape = (*k.shape[:2], self.capacity, k.shape[3])
            self.k = empty_resident(shape, k.dtype, self.residency, k.device)
            self.v = empty_resident((*v.shape[:2], self.capacity, v.shape[3]), v.dtype, self.residency, v.device)
        end = self.rows + k.shape[2]
        if end > self.capacity:
            raise ValueError(f"layer {self.layer_number}: {end} rows do not fit into pages of {self.capacity}")
        self.k[:, :, self.rows : end].copy_(k.detach())
        self.v[:, :, self.rows : end].copy_(v.detach())
        self.rows = end

    def release(self, rows: int) -> None:
        """Drop the pages after the first `rows` rows; their adjoints must have been read."""
        self.rows = rows
        self._staging.drop(self.id)

    def read(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `rows` rows of k and v on the compute device; staged there if the pages live on the host."""
        k, v = self.k[:, :, :rows], self.v[:, :, :rows]
        return (k, v) if self.residency == "device" else self._staging.fetch(self.id, rows, (k, v))

    def prefetch(self, rows: int) -> None:
        """Start bringing the first `rows` rows to the device."""
        if self.residency == "host" and rows:
            self._staging.prefetch(self.id, rows, (self.k[:, :, :rows], self.v[:, :, :rows]))

    def open_adjoints(self, device: torch.device) -> None:
        """Allocate zero adjoints for the pages; a second call does nothing. Empty pages have adjoints too."""
        if self.dk is None:
            wide = torch.promote_types(self.k.dtype, torch.float32)
            self.dk = zeros_resident(self.k.shape, wide, self.adjoint_residency, device)
            self.dv = zeros_resident(self.v.shape, wide, self.adjoint_residency, device)

    def add_adjoint(self, start: int, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Add dk and dv [B, G, n, D] to the adjoints of the rows [start, start + n)."""
        rows = slice(start, start + dk.shape[2])
        self.dk[:, :, rows] += dk.to(self.dk.device)
        self.dv[:, :, rows] += dv.to(self.dv.device)

    def adjoint(self, start: int, end: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The accumulated (dK, dV) of rows [start, end), each [B, G, end - start, D], on `device`."""
        return self.dk[:, :, start:end].to(device), self.dv[:, :, start:end].to(device)

    def select_batch(self, index: torch.Tensor) -> None:
        """Keep the given members of the batch, in that order (finished responses leave a decoding batch)."""
        if self.k is not None:
            self.k, self.v = self.k.index_select(0, index.to(self.k.device)), self.v.index_select(0, index.to(self.v.device))
            self._staging.drop(self.id)

    def ledger_entries(self) -> list[LedgerEntry]:
        """The pages, their adjoints and their staged copies."""
        held = [("kv_pages", self.residency, (self.k, self.v)), ("kv_adjoint", self.adjoint_residency, (self.dk, self.dv))]
        entries = [
            self._entry(kind, sum(map(storage_bytes, tensors)), residency)
            for kind, residency, tensors in held
            if tensors[0] is not None
        ]
        staged = self._staging.staged().get(self.id)
        return entries + ([self._entry("staged", staged, "device")] if staged is not None else [])

    def _entry(self, kind, bytes_, residency):
        return LedgerEntry(kind, self.segment, self.layer_number, self.owner, self.rows, bytes_, residency)


@dataclass(frozen=True)
class PageView:
    """The first rows of an arena, as a later block sees them (`longstraw.attention.geometry.Pages`).

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
        return 1 if self.arena.k is None else self.arena.k.shape[0]

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(k, v) [B, G, rows, D] on the compute device."""
        return self.arena.read(self.rows)

    def add_adjoint(self, dk: torch.Tensor, dv: torch.Tensor, start: int = 0) -> None:
        """Add to the arena's adjoints of the rows from `start` on, unless they are constants."""
        if not self.constant:
            self.arena.add_adjoint(start, dk, dv)
