"""Choices of experts kept by the forward sweep, so that the reverse sweep sends every token where it went before.

A choice is discrete: recomputed from activations that differ in the last bit, it can fall elsewhere, and the gradient
would be that of another function. One number a token and chosen expert, on the device or on the host.

T tokens of a block that this rank owns (over the whole batch), K experts a token.
"""

import torch

from longstraw.memory_scopes import memory_scope, state_category
from longstraw.prompt_state.ledger import LedgerEntry, storage_bytes
from longstraw.prompt_state.residency import Residency, bring, empty_resident


class RoutingRecord:
    """The experts [T, K] of each block of one layer and segment, on one rank."""

    def __init__(self, *, segment: str, layer_number: int, owner: int, num_experts: int, residency: Residency):
        self.segment, self.layer_number, self.owner, self.residency = segment, layer_number, owner, residency
        self.dtype = torch.uint8 if num_experts <= 256 else torch.int16
        self._blocks: dict[int, torch.Tensor] = {}

    def keep(self, block: int, experts: torch.Tensor) -> None:
        """Keep a block's experts [T, K] (of any integer type)."""
        with memory_scope(state_category(self.segment)):
            held = empty_resident(tuple(experts.shape), self.dtype, self.residency, experts.device)
        self._blocks[block] = held.copy_(experts)

    def read(self, block: int, device: torch.device) -> torch.Tensor | None:
        """A block's experts [T, K] as int64 on `device`; None where the block has not run before."""
        held = self._blocks.get(block)
        return None if held is None else bring(held, self.residency, device).long()

    def drop(self, block: int) -> None:
        """Forget a block, if it is there."""
        self._blocks.pop(block, None)

    def ledger_entries(self) -> list[LedgerEntry]:
        """One entry for all kept blocks."""
        bytes_ = sum(storage_bytes(experts) for experts in self._blocks.values())
        rows = sum(experts.shape[0] for experts in self._blocks.values())
        where = (self.segment, self.layer_number, self.owner, rows, bytes_, self.residency)
        return [LedgerEntry("routing", *where)] if self._blocks else []
