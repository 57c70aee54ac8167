"""What state is resident, where, whose and why, at any moment.

The ledger keeps no counts of its own: it holds weak references to the owners of state (pages, recurrent states, kept
outputs) and asks them. What has been freed is gone from its answers, and nothing can drift.
"""

import weakref
from collections import defaultdict
from dataclasses import dataclass
from typing import Iterable, Protocol

import torch


@dataclass(frozen=True)
class LedgerEntry:
    """One resident tensor of state.

    kind: kv_pages, kv_adjoint, latent_pages, latent_adjoint, index_pages, index_adjoint, selection, recurrent_state, conv_state,
    gdn_adjoint, attention_output, routing, staged or staged_adjoint.
    segment: the segment's name. layer_number: Megatron's, from 1. owner: the context-parallel rank that holds it.
    rows: tokens in it, where it has such. bytes: of its storage, not only of the rows in use. residency: device or host.
    """

    kind: str
    segment: str
    layer_number: int
    owner: int
    rows: int
    bytes: int
    residency: str


def foreseen(segment, layer_number: int, rows: int, found: Iterable[tuple[str, int, str]]) -> list[LedgerEntry]:
    """Entries of what a layer's state of a segment will hold; found: (kind, bytes, residency) of each."""
    owner = segment.plan[0].rank if segment.plan else 0
    return [
        LedgerEntry(kind, segment.name, layer_number, owner, rows, size, residency) for kind, size, residency in found
    ]


class StateOwner(Protocol):
    """Anything that holds state: it lists what it holds."""

    def ledger_entries(self) -> Iterable[LedgerEntry]: ...


class Ledger:
    """All owners of state of one engine on this rank."""

    def __init__(self):
        self._owners: weakref.WeakSet = weakref.WeakSet()

    def watch(self, owner: StateOwner) -> None:
        """Include the owner from now on, for as long as it lives."""
        self._owners.add(owner)

    def entries(self) -> list[LedgerEntry]:
        """Every resident tensor of state, by segment, layer and kind."""
        found = [entry for owner in self._owners for entry in owner.ledger_entries()]
        return sorted(found, key=lambda e: (e.segment, e.layer_number, e.kind))

    def bytes_by(self, *fields: str) -> dict[tuple, int]:
        """Total bytes by any of LedgerEntry's fields, e.g. bytes_by("kind", "residency")."""
        totals: dict[tuple, int] = defaultdict(int)
        for entry in self.entries():
            totals[tuple(getattr(entry, field) for field in fields)] += entry.bytes
        return dict(totals)


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the tensor's whole storage."""
    return tensor.untyped_storage().nbytes()
