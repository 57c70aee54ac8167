"""The float32 masters of a bfloat16 weight, shared out by rows over the ranks that hold the same weight.

d rows and k columns of the weight on this rank, N ranks that hold the same d rows (data x context parallelism).

Each rank keeps the masters of d / N rows, updates those, and the ranks exchange the bfloat16 rows that come out. Masters
are a float32 copy or the 16 bits that the bfloat16 lacks (`masters`): the same updates, bit for bit. On the host a slice
of rows is brought to the device, updated and taken back.

Left out: masters of float32 weights, which need none.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from longstraw.memory_scopes import memory_scope
from longstraw.optim.masters import join_float32, split_float32

Change = Callable[[torch.Tensor, slice, torch.Tensor | None], None]
"""change(rows of the weight or of its float32 copy, which rows, their remainder): subtracts in place."""


class MasterRows:
    """The masters of one weight on this rank.

    kind: "float32" or "remainder". residency: "device" or "host". group: the ranks that hold the same weight.
    rows_at_once: rows that are on the device at a time.
    """

    def __init__(
        self, weight: torch.Tensor, *, kind: str, residency: str, group: dist.ProcessGroup | None = None,
        rows_at_once: int = 1024,
    ):
        if weight.dtype != torch.bfloat16:
            raise ValueError(f"Masters belong to bfloat16 weights, not to {weight.dtype} ones.")
        self.kind, self.residency, self.group, self.rows_at_once = kind, residency, group, rows_at_once
        ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
        self.share = -(-weight.shape[0] // ranks)
        """Rows of each rank; the last may have fewer."""
        self.start = min(rank * self.share, weight.shape[0])
        self.stop = min(self.start + self.share, weight.shape[0])
        shape, device = (self.stop - self.start, weight.shape[1]), "cpu" if residency == "host" else weight.device
        with memory_scope("optimizer", residency):
            self.rows = torch.empty(shape, dtype=torch.float32 if kind == "float32" else torch.int16, device=device)
        if residency == "host" and weight.is_cuda:
            self.rows = self.rows.pin_memory()
        self.reset(weight)

    @torch.no_grad()
    def reset(self, weight: torch.Tensor) -> None:
        """Start from the bfloat16 weight as it is: exactly its values."""
        if self.kind == "remainder":
            self.rows.zero_()
        else:
            self.rows.copy_(weight[self.start : self.stop])

    @torch.no_grad()
    def update(self, weight: torch.Tensor, change: Change) -> None:
        """Change this rank's rows at full precision, then exchange the weight's rows. Collective over the group."""
        for start in range(self.start, self.stop, self.rows_at_once):
            rows = slice(start, min(start + self.rows_at_once, self.stop))
            kept = self.rows[rows.start - self.start : rows.stop - self.start]
            held = kept.to(weight.device)
            if self.kind == "remainder":
                change(weight[rows], rows, held)
            else:
                change(held, rows, None)
                weight[rows] = split_float32(held)[0]
            if held.data_ptr() != kept.data_ptr():
                kept.copy_(held)
        self._exchange(weight)

    def _exchange(self, weight: torch.Tensor) -> None:
        if self.group is None or self.group.size() == 1:
            return
        own = weight.new_zeros(self.share, weight.shape[1])
        own[: self.stop - self.start] = weight[self.start : self.stop]
        parts = [torch.empty_like(own) for _ in range(self.group.size())]
        dist.all_gather(parts, own, group=self.group)
        weight.copy_(torch.cat(parts)[: len(weight)])

    def whole(self, weight: torch.Tensor) -> torch.Tensor:
        """The float32 weight of all rows [d, k]. Collective over the group."""
        own = torch.zeros(self.share, weight.shape[1], dtype=torch.float32, device=weight.device)
        mine = self.rows.to(weight.device)
        own[: len(mine)] = mine if self.kind == "float32" else join_float32(weight[self.start : self.stop], mine)
        if self.group is None or self.group.size() == 1:
            return own
        parts = [torch.empty_like(own) for _ in range(self.group.size())]
        dist.all_gather(parts, own, group=self.group)
        return torch.cat(parts)[: len(weight)]

    @torch.no_grad()
    def load(self, weight: torch.Tensor, full: torch.Tensor) -> None:
        """Take the float32 weight [d, k]; the bfloat16 weight becomes its rounding."""
        high, low = split_float32(full)
        weight.copy_(high)
        source = low if self.kind == "remainder" else full
        self.rows.copy_(source[self.start : self.stop])

    @staticmethod
    def subtract(target: torch.Tensor, change: torch.Tensor, remainder: torch.Tensor | None) -> None:
        """target -= change in place: float32 or wider, or bfloat16 with its remainder."""
        if remainder is None:
            target.sub_(change.to(target.dtype))
            return
        high, low = split_float32(join_float32(target, remainder).sub_(change))
        target.copy_(high)
        remainder.copy_(low)
