"""The random matrix A of a gradient sketch, made from a counter wherever and whenever a piece of it is needed.

R sketch rank (rows of A), k columns of A (inputs of the weight), n columns of a piece.

A = B / sqrt(R). An entry of B is a function of (seed, draw, parameter name, row, column) and of nothing else, so any
piece of it is made alone: a rank of a row-parallel weight makes its own columns, a block of the backward its own slice,
the rollout side the same matrix again. Nobody stores or sends A.

    key       64 bits: BLAKE2b of seed, draw and the parameter's name
    counter   64 bits: (row, number of the block of columns)
    words     two of 32 bits: Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2,
              3", 2011), checked against its published answers
    entries   rademacher: each bit is one column, +1 or -1, so a block is 64 columns wide
              gaussian: each 16 bits are one column, so a block is 4 wide: the number u becomes the quantile
              (u + 1/2) / 2^16 of the normal distribution, on a grid of 2^-18, scaled to variance 1

All of it is integer arithmetic without overflow (32-bit words in int64) and table look-ups, so entries of B are the
same bits on every device and for every shard. They are exact in float32, Rademacher entries also in 16 bits; A's are
one correctly rounded product away. The gaussian differs from a true normal by its bounded tails (at most 4.33) and a
kurtosis of 2.999 instead of 3; its variance is 1 to within 1e-9, which is what makes A^T A unbiased.

The words are most of the work where a weight is small and its sketch is added to often, so they can be kept for as long
as a draw lasts (`pack_columns`): 1 bit an entry of a Rademacher matrix. They are never saved or sent.

Left out: orthogonal and structured projections.
"""

import functools
import hashlib
import math
import struct
from array import array
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import torch

MASK = 0xFFFFFFFF
ROUNDS = 20
_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_PARITY = 0x1BD11BDA

GAUSSIAN_GRID = 2.0**-18
_BITS_PER_ENTRY = {"rademacher": 1, "gaussian": 16}


@dataclass(frozen=True, kw_only=True)
class Projection:
    """Which A: of which weight, in which draw. Holds no tensor."""

    name: str
    """The parameter's name in the whole model (an expert with its number among all), the same on every rank."""

    rank: int
    """R, the rows of A."""

    columns: int
    """k, the columns of the whole weight, all ranks' shards together."""

    seed: int
    draw: int
    """Counts the redraws: the optimizer step divided by the steps between two draws."""

    kind: Literal["rademacher", "gaussian"] = "rademacher"

    def __post_init__(self) -> None:
        """Refuse what cannot be drawn or saves nothing.

        Raises:
            ValueError: in one sentence that names the flag.
        """
        if self.kind not in _BITS_PER_ENTRY:
            raise ValueError(f"--logra-projection must be rademacher or gaussian, got {self.kind!r}.")
        if self.rank < 1:
            raise ValueError(f"--logra-rank must be at least 1, got {self.rank}.")
        if self.rank > self.columns:
            raise ValueError(
                f"--logra-rank {self.rank} is above the {self.columns} input columns of {self.name}, so a sketch "
                "would be no saving: lower the rank."
            )
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"--logra-seed must fit 64 bits, got {self.seed}.")
        if not 0 <= self.draw < 2**63:
            raise ValueError(f"A draw counts from 0, got {self.draw}.")

    @functools.cached_property
    def key(self) -> tuple[int, int]:
        """Two words of 32 bits."""
        counted = struct.pack("<qQ", self.seed, self.draw) + self.name.encode()
        digest = hashlib.blake2b(counted, digest_size=8, person=b"longstraw sketch").digest()
        return struct.unpack("<II", digest)

    @property
    def scale(self) -> float:
        """What B is multiplied by to be A."""
        return 1.0 / math.sqrt(self.rank)

    @property
    def block_columns(self) -> int:
        """Columns that share one counter: pieces that start at multiples of it cost least."""
        return 64 // _BITS_PER_ENTRY[self.kind]


def project_columns(
    projection: Projection, start: int, stop: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """A[:, start:stop], [R, stop - start] in float32 or float64."""
    return unscaled_columns(projection, start, stop, dtype=dtype, device=device) * projection.scale


def unscaled_columns(
    projection: Projection,
    start: int,
    stop: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    rows: tuple[int, int] | None = None,
) -> torch.Tensor:
    """B[:, start:stop], the entries before the division by sqrt(R), each exact in `dtype`.

    Args:
        start, stop: columns of the whole weight; an empty piece is allowed.
        dtype: float32 or float64; Rademacher entries also in bfloat16 and float16.
        rows: [first, last) rows of B; None takes all R.

    Returns:
        [rows, stop - start], perhaps a view of a slightly wider piece.

    Raises:
        ValueError: columns or rows outside A, or a dtype that would round the entries.
    """
    first, last = (0, projection.rank) if rows is None else rows
    if not (0 <= start <= stop <= projection.columns and 0 <= first <= last <= projection.rank):
        raise ValueError(
            f"Rows [{first}, {last}) and columns [{start}, {stop}) do not lie in A of {projection.name}, which is "
            f"{projection.rank} x {projection.columns}."
        )
    _check_dtype(projection.kind, dtype)
    width = projection.block_columns
    blocks = (start // width, -(-stop // width))
    entries = _expand_words(
        draw_words(projection, (first, last), blocks, device), _value_table(projection.kind, dtype, device)
    )
    return entries[:, start - blocks[0] * width : stop - blocks[0] * width]


@dataclass(frozen=True, kw_only=True)
class PackedColumns:
    """The drawn words of some columns of A, and the tables that turn them into entries."""

    projection: Projection
    start: int
    stop: int
    words: torch.Tensor
    """int32 [R, blocks, 2]: the words of 32 bits, as signed numbers."""

    tables: dict[torch.dtype, torch.Tensor]
    """By dtype, filled on first use."""

    def entries(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """B[:, start:stop], as `unscaled_columns` gives it. The columns must lie in the packed ones."""
        if not self.start <= start <= stop <= self.stop:
            raise ValueError(
                f"Columns [{start}, {stop}) of {self.projection.name} were not packed, only [{self.start}, "
                f"{self.stop})."
            )
        _check_dtype(self.projection.kind, dtype)
        if dtype not in self.tables:
            self.tables[dtype] = _value_table(self.projection.kind, dtype, self.words.device)
        width = self.projection.block_columns
        first, end = start // width, -(-stop // width)
        packed_from = self.start // width
        entries = _expand_words(self.words[:, first - packed_from : end - packed_from], self.tables[dtype])
        return entries[:, start - first * width : stop - first * width]


def pack_columns(projection: Projection, start: int, stop: int, device: torch.device | str = "cpu") -> PackedColumns:
    """Draw the words of columns [start, stop) once, to be used many times."""
    width = projection.block_columns
    words = draw_words(projection, (0, projection.rank), (start // width, -(-stop // width)), device)
    signed = ((words ^ 0x80000000) - 0x80000000).to(torch.int32)
    return PackedColumns(projection=projection, start=start, stop=stop, words=signed, tables={})


def draw_words(
    projection: Projection, rows: tuple[int, int], blocks: tuple[int, int], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """The random words of some rows and blocks of columns: int64 in [0, 2^32), [rows, blocks, 2]."""
    row = torch.arange(*rows, device=device)[:, None].expand(-1, blocks[1] - blocks[0])
    block = torch.arange(*blocks, device=device).expand(rows[1] - rows[0], -1)
    return torch.stack(mix_counter(projection.key, row, block), -1)


def mix_counter(key: tuple[int, int], x0, x1, rounds: int = ROUNDS):
    """Threefry-2x32 of a counter (x0, x1): a pair of words of 32 bits.

    x0, x1: Python ints or int64 tensors of one shape in [0, 2^32). No intermediate leaves [0, 2^63), so nothing rests
    on how an overflow wraps.
    """
    schedule = (*key, _PARITY ^ key[0] ^ key[1])
    x0, x1 = (x0 + schedule[0]) & MASK, (x1 + schedule[1]) & MASK
    for number in range(rounds):
        turn = _ROTATIONS[number % 8]
        x0 = (x0 + x1) & MASK
        x1 = (((x1 << turn) | (x1 >> (32 - turn))) & MASK) ^ x0
        if number % 4 == 3:
            injection = number // 4 + 1
            x0 = (x0 + schedule[injection % 3]) & MASK
            x1 = (x1 + schedule[(injection + 1) % 3] + injection) & MASK
    return x0, x1


def naive_entry(projection: Projection, row: int, column: int) -> float:
    """The specification of an entry of B, in Python integers."""
    block, inside = divmod(column, projection.block_columns)
    bits = _BITS_PER_ENTRY[projection.kind]
    word, number = divmod(inside, 32 // bits)
    value = (mix_counter(projection.key, row, block)[word] >> (number * bits)) & ((1 << bits) - 1)
    return 2.0 * value - 1.0 if projection.kind == "rademacher" else _gaussian_levels()[value] * GAUSSIAN_GRID


def _check_dtype(kind: str, dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.float64) and kind != "rademacher":
        raise ValueError(f"--logra-projection {kind} has entries that {dtype} would round: use float32.")


def _expand_words(words: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Words [rows, blocks, 2], signed or not, to entries [rows, all columns of the blocks]."""
    bits = len(table).bit_length() - 1
    shifts = torch.arange(0, 32, bits, dtype=words.dtype, device=words.device)
    index = (words[..., None] >> shifts) & (len(table) - 1)
    return table.index_select(0, index.flatten()).view(len(words), index[:1].numel() * table.shape[1])


def _value_table(kind: str, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    return _sign_table(dtype, device) if kind == "rademacher" else _gaussian_table(dtype, device)


def _sign_table(dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """[256, 8]: the signs of a byte's bits, lowest first."""
    bits = (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)) & 1
    return bits.to(dtype).mul_(2).sub_(1)


def _gaussian_table(dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """[65536, 1]: the value of each 16 bits."""
    levels = torch.frombuffer(_gaussian_levels(), dtype=torch.int32).to(device)
    return levels[:, None].to(dtype).mul_(GAUSSIAN_GRID)


@functools.cache
def _gaussian_levels() -> array:
    """The 2^16 quantiles in units of GAUSSIAN_GRID, as integers.

    They are integers so that a mathematical library's last bit cannot show: no quantile lies near enough to a rounding
    boundary of the grid (a test measures how near). The lower half is the upper half's mirror image.
    """
    upper = [NormalDist().inv_cdf((u + 0.5) / 65536) for u in range(32768, 65536)]
    to_unit_variance = math.sqrt(len(upper) / math.fsum(value * value for value in upper))
    positive = [round(value * to_unit_variance / GAUSSIAN_GRID) for value in upper]
    return array("i", [-level for level in reversed(positive)] + positive)
