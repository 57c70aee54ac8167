"""Attention outputs kept by the forward sweep, so that the reverse sweep does not redo the quadratic part.

One output vector and one log-sum-exp a token and head, on the device or on the host. Exact: the backward of attention
needs q, k, v, output and log-sum-exp only.

B batch, H query heads, R rows, D head dim.
"""

from typing import Literal

import torch

from longstraw.memory_scopes import memory_scope, state_category
from longstraw.prompt_state.ledger import LedgerEntry, storage_bytes
from longstraw.prompt_state.residency import bring, empty_resident

KeptResidency = Literal["none", "host", "device"]


class KeptOutputs:
    """(output [B, H, R, D], log-sum-exp [B, H, R]) of each block of one layer and segment, on one rank."""

    def __init__(self, *, segment: str, layer_number: int, owner: int, residency: KeptResidency):
        self.segment, self.layer_number, self.owner, self.residency = segment, layer_number, owner, residency
        self._blocks: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(self, block: int, o: torch.Tensor, lse: torch.Tensor) -> None:
        """Keep a block's output and log-sum-exp; nothing with residency "none"."""
        if self.residency == "none":
            return
        copies = []
        for tensor in (o, lse):
            with memory_scope(state_category(self.segment)):
                copy = empty_resident(tuple(tensor.shape), tensor.dtype, self.residency, tensor.device)
            copies.append(copy.copy_(tensor.detach()))
        self._blocks[block] = (copies[0], copies[1])

    def take(self, block: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A block's kept output and log-sum-exp on `device`, forgotten here; None where nothing was kept."""
        held = self._blocks.pop(block, None)
        return None if held is None else tuple(bring(t, self.residency, device) for t in held)

    def ledger_entries(self) -> list[LedgerEntry]:
        """One entry for all kept blocks."""
        bytes_ = sum(storage_bytes(t) for pair in self._blocks.values() for t in pair)
        rows = sum(o.shape[2] for o, _ in self._blocks.values())
        where = (self.segment, self.layer_number, self.owner, rows, bytes_, self.residency)
        return [LedgerEntry("attention_output", *where)] if self._blocks else []
