"""How one block of tokens lies over the context-parallel ranks.

A block is split contiguously into equal slots, padded at its end so that every exchange is even: each rank runs `rows`
rows (Megatron's attention cannot run on none), of which `mine` are real tokens. Slot s belongs to rank
(s + rotation) % ranks: rotating the first rank from block to block keeps short blocks from always landing on the same
ranks. Positions stay in order, so no zigzag: ranks own equal parts of every block, which balances the work.

C tokens of the block, R rows a rank.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BlockLayout:
    """The split of a block of `length` tokens that starts at absolute position `start`.

    unit: rows come in multiples of it (the TP size under sequence parallelism, else 1).
    group: the context-parallel process group, or None for one rank.
    """

    start: int
    length: int
    ranks: int = 1
    rank: int = 0
    rotation: int = 0
    unit: int = 1
    group: object = None

    def __post_init__(self):
        if self.length < 1:
            raise ValueError(f"a block has at least 1 token, not {self.length}")

    @property
    def rows(self) -> int:
        """Rows that every rank runs, padding included."""
        return -(-self.length // (self.ranks * self.unit)) * self.unit

    @property
    def slot(self) -> int:
        """This rank's place in the order of positions."""
        return (self.rank - self.rotation) % self.ranks

    @property
    def first(self) -> int:
        """Index in the block of this rank's first token (the block's length where it owns none)."""
        return min(self.slot * self.rows, self.length)

    @property
    def mine(self) -> int:
        """Number of the block's tokens that this rank owns; may be 0."""
        return self.tokens_of(self.rank)

    def tokens_of(self, rank: int) -> int:
        """Number of the block's tokens that `rank` owns; may be 0."""
        first = (rank - self.rotation) % self.ranks * self.rows
        return min(self.rows, self.length - min(first, self.length))

    @property
    def row_position(self) -> int:
        """Absolute position of this rank's first row (of padding where it owns no token)."""
        return self.start + self.slot * self.rows

    def owner(self, index: int) -> int:
        """The rank that owns the block's token `index`."""
        return (index // self.rows + self.rotation) % self.ranks

    def take_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [B, C], equal on every rank -> this rank's rows [B, R]; padding rows are 0."""
        at = self.slot * self.rows
        return pad_rows(tokens, self.ranks * self.rows, 1)[:, at : at + self.rows].contiguous()

    def sub_blocks(self, rows_at_once: int) -> list[tuple[int, int]]:
        """Spans of rows [(a, b), ...] of at most `rows_at_once`, which bound the buffer of gathered queries."""
        return [(a, min(a + rows_at_once, self.rows)) for a in range(0, self.rows, rows_at_once)]


def pad_rows(x: torch.Tensor, rows: int, dim: int) -> torch.Tensor:
    """x with zeros after its end along `dim`, up to `rows`."""
    missing = rows - x.shape[dim]
    if missing == 0:
        return x
    return torch.cat([x, x.new_zeros(*x.shape[:dim], missing, *x.shape[dim + 1 :])], dim)


def plan_blocks(start: int, length: int, block_size: int, ranks: int, rank: int, unit: int, group) -> list[BlockLayout]:
    """Cut `length` tokens from absolute position `start` into blocks of at most `block_size`.

    The first rank moves on by one from block to block, so that each rank takes each slot equally often: whatever the
    number of blocks, no rank owns more than `block_size` tokens more than another.
    """
    if block_size < 1:
        raise ValueError(f"--prompt-chunk-size and --response-block-size are at least 1, not {block_size}")
    return [
        BlockLayout(start + at, min(block_size, length - at), ranks, rank, index % ranks, unit, group)
        for index, at in enumerate(range(0, length, block_size))
    ]
