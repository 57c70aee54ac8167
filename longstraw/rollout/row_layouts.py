"""How the rows of one Megatron weight are made of the rows of several HF weights, and back.

A layout is a reordering of rows and nothing else: no arithmetic touches a value, so a round trip keeps every bit.

Legend: H query heads, G key/value heads (query groups), D head dim, E input features.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StackedRows:
    """HF weights one below the other: sizes in rows. One size is a weight that both sides hold alike."""

    sizes: tuple[int, ...]

    def merge(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """HF weights [sizes[i], ...] -> the Megatron weight [sum of sizes, ...]."""
        return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), 0)

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The inverse of `merge`."""
        return list(tensor.split(self.sizes, 0))


@dataclass(frozen=True)
class GroupedQKV:
    """q, k, v -> Megatron's linear_qkv: for each group its query heads, their output gates (if any), its key, its value.

    HF holds q [H * D, E] (with gates [H * 2 * D, E]: each head's query rows, then its gate rows), k and v [G * D, E].
    """

    heads: int
    groups: int
    head_dim: int
    gated: bool

    def merge(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """[q, k, v] -> [G * (H / G * (1 or 2) + 2) * D, E]."""
        q, k, v = tensors
        parts, width = 2 if self.gated else 1, q.shape[1]
        q = q.view(self.groups, self.heads // self.groups, parts, self.head_dim, width)
        k, v = (t.view(self.groups, 1, self.head_dim, width) for t in (k, v))
        return torch.cat([q.transpose(1, 2).flatten(1, 2), k, v], 1).flatten(0, 2)

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The inverse of `merge`."""
        parts, per_group, width = 2 if self.gated else 1, self.heads // self.groups, tensor.shape[1]
        grouped = tensor.view(self.groups, parts * per_group + 2, self.head_dim, width)
        q, k, v = grouped.split([parts * per_group, 1, 1], 1)
        q = q.reshape(self.groups, parts, per_group, self.head_dim, width).transpose(1, 2)
        return [t.reshape(-1, width) for t in (q, k, v)]
