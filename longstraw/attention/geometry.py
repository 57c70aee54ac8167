"""What an attention call needs besides tensors, and the choice of what to pass between ranks: queries or keys.

Passing queries moves every rank's queries to every rank, and partial outputs back; passing keys moves every rank's keys
and values, and in the backward their gradients back. Queries cost bytes by the block's length, keys by the length of all
that it attends to: keys are cheaper where a block is long beside what is resident (the first chunks of a prompt, with
few key/value heads), queries everywhere else.

B batch, H query heads, G key/value heads, R rows a rank, M own tokens, N pages' rows, D key dim, V value dim.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from longstraw.attention.layout import BlockLayout

Exchange = Literal["auto", "queries", "keys"]


class Pages(Protocol):
    """Keys and values that this rank owns from earlier blocks of one layer and one segment.

    rows: how many. rows_of_ranks: how many each rank owns, equal on every rank. batch: 1 where a larger batch shares
    them. constant: their adjoints are left alone.
    """

    rows: int
    rows_of_ranks: tuple[int, ...]
    batch: int
    constant: bool

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(k, v), each [B or 1, G, N, D], on the compute device; batch 1 is shared by the block's whole batch."""

    def add_adjoint(self, dk: torch.Tensor, dv: torch.Tensor, start: int = 0) -> None:
        """Add to the adjoints of the rows from `start` on; nothing where the pages are constants."""


@dataclass(frozen=True)
class AttentionGeometry:
    """All that the autograd node of an attention call keeps of its block.

    scale: softmax scale. rows_at_once: rows a rank that are gathered at a time. history: earlier pages.
    exchange: what goes between the ranks; "auto" takes what moves fewer bytes.
    """

    layout: BlockLayout
    scale: float
    rows_at_once: int
    history: tuple[Pages, ...]
    exchange: Exchange = "auto"

    def passes_keys(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
        """Whether this call passes keys; equal on every rank, and in the forward and the reverse sweep.

        q [B, H, R, D], k [B, G, M, D], v [B, G, M, V].
        """
        if self.layout.ranks == 1 or self.exchange == "queries":
            return False
        return self.exchange == "keys" or self.bytes_by_keys(k, v) < self.bytes_by_queries(q, v)

    def bytes_by_queries(self, q: torch.Tensor, v: torch.Tensor) -> int:
        """Bytes that all ranks receive in a forward and a backward that pass queries."""
        width, wide = q.element_size(), max(q.element_size(), 4)
        batch, heads, rows, dim = q.shape
        forward = dim * width + (v.shape[-1] + 1) * wide
        backward = (2 * dim + v.shape[-1]) * width + (1 + dim) * wide
        return self.layout.ranks * (self.layout.ranks - 1) * batch * heads * rows * (forward + backward)

    def bytes_by_keys(self, k: torch.Tensor, v: torch.Tensor) -> int:
        """Bytes that all ranks receive in a forward and a backward that pass keys."""
        width, wide = k.element_size(), max(k.element_size(), 4)
        batch, groups = k.shape[:2]
        own = batch * self.layout.rows * (2 * width + wide)
        earlier = sum(
            pages.batch * max(pages.rows_of_ranks) * (2 * width + (0 if pages.constant else wide)) for pages in self.history
        )
        return self.layout.ranks * (self.layout.ranks - 1) * groups * (k.shape[-1] + v.shape[-1]) * (own + earlier)
