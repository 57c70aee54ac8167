"""Views of the pages of multi-latent attention, and the selections that the forward sweep kept.

A layer's latent pages are one tensor of one head: the normalised latent and the rotary key of each token, with an adjoint.
Layers that compute a selection also have index pages, the indexer's keys. A selection has no gradient: index pages have
adjoints only where the indexer's own loss trains it. Both lie in arenas (`longstraw.prompt_state.pages`).

B batch, N rows in use, D latent key width, E index dim.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from longstraw.attention.selection import Selection
from longstraw.memory_scopes import memory_scope, state_category
from longstraw.prompt_state.kept import KeptResidency
from longstraw.prompt_state.ledger import LedgerEntry, storage_bytes
from longstraw.prompt_state.pages import ArenaView
from longstraw.prompt_state.residency import bring, empty_resident


@dataclass(frozen=True)
class LatentView(ArenaView):
    """A view of latent pages (`longstraw.attention.sparse.LatentPages`); device: where attention runs."""

    device: torch.device = torch.device("cpu")

    def read(self) -> torch.Tensor:
        """[B, rows, D] on the compute device."""
        return self.arena.read(self.rows)[0][:, 0]

    @contextmanager
    def adjoint(self) -> Iterator[torch.Tensor | None]:
        """What to add to the adjoints of these rows, in place: [B, rows, D]; None where they are constants."""
        if self.constant:
            yield None
            return
        with self.arena.adding(self.rows, self.device) as (sums,):
            yield sums[:, 0]


@dataclass(frozen=True)
class IndexView(LatentView):
    """A view of index pages (`longstraw.attention.selection.IndexPages`), [B, rows, E]; at: the positions of all of the
    arena's rows."""

    at: torch.Tensor | None = None

    def positions(self) -> torch.Tensor:
        """Absolute positions [rows], ascending."""
        return self.at[: self.rows]


class KeptSelections:
    """The selection of each block of one computing layer and segment, on one rank, so that no key is scored twice."""

    def __init__(self, *, segment: str, layer_number: int, owner: int, residency: KeptResidency):
        self.segment, self.layer_number, self.owner, self.residency = segment, layer_number, owner, residency
        self._blocks: dict[int, Selection] = {}

    def keep(self, block: int, selection: Selection) -> None:
        """Keep a block's selection; nothing with residency "none"."""
        if self.residency != "none":
            self._blocks[block] = selection.map(self._copy)

    def _copy(self, rows: torch.Tensor) -> torch.Tensor:
        with memory_scope(state_category(self.segment)):
            return empty_resident(tuple(rows.shape), rows.dtype, self.residency, rows.device).copy_(rows)

    def take(self, block: int, device: torch.device) -> Selection | None:
        """A block's selection on `device`, forgotten here; None where none was kept."""
        held = self._blocks.pop(block, None)
        return None if held is None else held.map(lambda rows: bring(rows, self.residency, device))

    def ledger_entries(self) -> list[LedgerEntry]:
        """One entry for all kept blocks; its rows are the queries that selected."""
        bytes_ = sum(storage_bytes(rows) for selection in self._blocks.values() for rows in selection.tensors())
        rows = sum(sources[0].shape[1] for selection in self._blocks.values() for sources in selection.parts)
        where = (self.segment, self.layer_number, self.owner, rows, bytes_, self.residency)
        return [LedgerEntry("selection", *where)] if self._blocks else []
