"""Boundary states of one gated delta net layer and one segment, and the adjoint that travels back over them.

The forward sweep leaves the state at the start of each block and at the segment's end: it is small, and it is what the
reverse sweep restarts each block from. `adjoint` is the loss's gradient with respect to the last boundary that has not
been differentiated yet: at first the segment's end, summed over the segments that follow; then block after block back.

B batch, H value heads of this rank, K key dim, V value dim, X conv channels of this rank, L conv kernel.
"""

from dataclasses import dataclass

import torch

from longstraw.memory_scopes import memory_scope, state_category
from longstraw.prompt_state.ledger import LedgerEntry, storage_bytes
from longstraw.prompt_state.residency import Residency, bring, empty_resident


@dataclass(frozen=True)
class GatedDeltaState:
    """recurrent [B, H, K, V] (float32 or wider) and conv [B, X, L - 1] (the activations' dtype), or their adjoints."""

    recurrent: torch.Tensor
    conv: torch.Tensor

    def map(self, function) -> "GatedDeltaState":
        """The same function on both tensors."""
        return GatedDeltaState(function(self.recurrent), function(self.conv))

    def expand_batch(self, batch: int) -> "GatedDeltaState":
        """A state of batch 1 shared by `batch` continuations (a view); a state of that batch as it is."""
        return self.map(lambda t: t if t.shape[0] == batch else t.expand(batch, *t.shape[1:]))


class RecurrentStates:
    """The boundary states of one layer and segment on one rank, by block; index len(blocks) is the segment's end.

    residency: of the boundaries. device: where blocks run; the adjoint stays there.
    """

    def __init__(
        self, *, segment: str, layer_number: int, owner: int, residency: Residency = "device", device: torch.device | None = None
    ):
        self.segment, self.layer_number, self.owner = segment, layer_number, owner
        self.residency, self.device = residency, device
        self._boundaries: dict[int, GatedDeltaState] = {}
        self.adjoint: GatedDeltaState | None = None

    def keep(self, boundary: int, state: GatedDeltaState) -> None:
        """Keep a copy: a conv state is a view of the whole block's input, which would live on with it."""
        with memory_scope(state_category(self.segment)):
            self._boundaries[boundary] = state.map(self._store)

    def _store(self, tensor: torch.Tensor) -> torch.Tensor:
        return empty_resident(tuple(tensor.shape), tensor.dtype, self.residency, tensor.device).copy_(tensor.detach())

    def at(self, boundary: int) -> GatedDeltaState:
        """The state at a boundary, on the device. Raises KeyError once it is released."""
        return self._boundaries[boundary].map(lambda t: bring(t, self.residency, self.device))

    def release(self, boundary: int) -> None:
        """Forget the state at a boundary."""
        self._boundaries.pop(boundary, None)

    @memory_scope("adjoints")
    def add_adjoint(self, adjoint: GatedDeltaState) -> None:
        """Add a following segment's adjoint of the end state, summed over its batch where the state is shared by it."""
        batch = next(iter(self._boundaries.values())).recurrent.shape[0]

        def widen(t):
            t = t.to(torch.promote_types(t.dtype, torch.float32))
            return t if t.shape[0] == batch else t.sum(0, keepdim=True)

        wide = adjoint.map(widen)
        if self.adjoint is not None:
            wide = GatedDeltaState(self.adjoint.recurrent + wide.recurrent, self.adjoint.conv + wide.conv)
        self.adjoint = wide

    def select_batch(self, index: torch.Tensor) -> None:
        """Keep the given members of the batch, in that order."""
        self._boundaries = {
            at: state.map(lambda t: t.index_select(0, index.to(t.device))) for at, state in self._boundaries.items()
        }

    def ledger_entries(self) -> list[LedgerEntry]:
        """Recurrent states, conv states and the adjoint."""
        states = list(self._boundaries.values())
        kinds = {
            "recurrent_state": [s.recurrent for s in states],
            "conv_state": [s.conv for s in states],
            "gdn_adjoint": [] if self.adjoint is None else [self.adjoint.recurrent, self.adjoint.conv],
        }
        return [
            LedgerEntry(
                kind, self.segment, self.layer_number, self.owner, 0, sum(map(storage_bytes, held)),
                "device" if kind == "gdn_adjoint" else self.residency,
            )
            for kind, held in kinds.items()
            if held
        ]
