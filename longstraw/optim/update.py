"""The weight update W <- W - step * U A, and norms of U A, from pieces: neither A nor U A exists whole.

d rows and k columns of this rank's shard, R sketch rank, U = row_scale * S [d, R].

Updates are made in float32 (float64 for float64 weights): in place on a float32 weight or master, or on a bfloat16
weight with its 16-bit remainder (`longstraw.optim.masters`). A bfloat16 weight alone is refused, since nearly all of
its updates would be rounded away.

The products are tiled from the shard's first row and column. On one device two calls give the same bits where their
tiles are the same: so a shard of rows that begins at a multiple of `rows_at_once` is updated bitwise as it would be in
the whole weight, and the rollout side gets the trainer's bits from the same limits.

Left out: weight decay, momentum.
"""

import torch

from longstraw.optim.masters import join_float32, split_float32
from longstraw.optim.projection import Projection
from longstraw.optim.sketch import BlockLimits, blocks_of_columns


@torch.no_grad()
def apply_update(
    weight: torch.Tensor,
    sketch: torch.Tensor,
    projection: Projection,
    step: float,
    *,
    row_scale: torch.Tensor | None = None,
    remainder: torch.Tensor | None = None,
    column_start: int = 0,
    rows_at_once: int = 1024,
    limits: BlockLimits = BlockLimits(),
) -> None:
    """weight -= step * (row_scale * sketch) A, in place, a tile at a time.

    Args:
        weight: [d, k] float32 or float64; bfloat16 with its `remainder`.
        sketch: [d, R]; row_scale: [d], or None for 1.
        remainder: [d, k] int16, updated with the weight.
        column_start: the shard's first column in the whole weight.

    Raises:
        ValueError: dtypes or shapes do not fit.
    """
    _check_update(weight, sketch, projection, row_scale, remainder, rows_at_once)
    wide = torch.promote_types(weight.dtype, torch.float32)
    for columns, entries in blocks_of_columns(projection, column_start, weight.shape[1], limits, wide, weight.device):
        for start in range(0, weight.shape[0], rows_at_once):
            rows = slice(start, start + rows_at_once)
            direction = sketch[rows].to(wide)
            if row_scale is not None:
                direction = direction * row_scale[rows, None].to(wide)
            change = direction.mul(step * projection.scale) @ entries
            tile = weight[rows, columns]
            if remainder is None:
                tile.sub_(change)
            else:
                high, low = split_float32(join_float32(tile, remainder[rows, columns]).sub_(change))
                tile.copy_(high)
                remainder[rows, columns] = low


def naive_update(
    weight: torch.Tensor, sketch: torch.Tensor, whole: torch.Tensor, step: float, row_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """The specification: the updated weight, with this shard's columns of A as `whole` [R, k]."""
    direction = sketch if row_scale is None else row_scale[:, None] * sketch
    return weight - step * direction @ whole


def _check_update(weight, sketch, projection, row_scale, remainder, rows_at_once) -> None:
    if weight.dim() != 2 or sketch.shape != (weight.shape[0], projection.rank):
        raise ValueError(
            f"A weight [d, k] is updated by a sketch [d, {projection.rank}], got {list(weight.shape)} and "
            f"{list(sketch.shape)} for {projection.name}."
        )
    if row_scale is not None and row_scale.shape != weight.shape[:1]:
        raise ValueError(f"row_scale must be [{weight.shape[0]}], got {list(row_scale.shape)}.")
    if rows_at_once < 1:
        raise ValueError(f"rows_at_once must be at least 1, got {rows_at_once}.")
    if weight.dtype == torch.bfloat16 and remainder is None:
        raise ValueError(
            f"{projection.name} is bfloat16 and has no remainder: its updates would be rounded away. Keep masters "
            "(--logra-masters)."
        )
    if weight.dtype not in (torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"{projection.name} is {weight.dtype}: updates are made in float32, float64 or bfloat16.")
    if remainder is not None and (
        weight.dtype != torch.bfloat16 or remainder.dtype != torch.int16 or remainder.shape != weight.shape
    ):
        raise ValueError(
            f"A remainder is int16 {list(weight.shape)} beside a bfloat16 weight, got {remainder.dtype} "
            f"{list(remainder.shape)} beside {weight.dtype}."
        )


@torch.no_grad()
def projection_gram(
    projection: Projection,
    *,
    dtype: torch.dtype = torch.float32,
    column_start: int = 0,
    columns: int | None = None,
    device: torch.device | str = "cpu",
    limits: BlockLimits = BlockLimits(),
) -> torch.Tensor:
    """A A^T over a shard's columns (None: all from column_start on), [R, R]; those of a row-parallel weight add up."""
    columns = projection.columns - column_start if columns is None else columns
    gram = torch.zeros(projection.rank, projection.rank, dtype=dtype, device=device)
    for _, entries in blocks_of_columns(projection, column_start, columns, limits, dtype, device):
        gram += entries @ entries.t()
    return gram.mul_(projection.scale**2)


@torch.no_grad()
def update_square_norm(
    sketch: torch.Tensor, gram: torch.Tensor, *, row_scale: torch.Tensor | None = None, rows_at_once: int = 1024
) -> torch.Tensor:
    """||U A||^2 over this rank's rows, [] float64, from U [d, R] and A A^T [R, R] of the whole weight."""
    total = torch.zeros((), dtype=torch.float64, device=sketch.device)
    for start in range(0, sketch.shape[0], rows_at_once):
        rows = slice(start, start + rows_at_once)
        direction = sketch[rows]
        if row_scale is not None:
            direction = direction * row_scale[rows, None]
        total += (direction.to(gram.dtype) @ gram).mul_(direction).sum(dtype=torch.float64)
    return total


def sketch_cosine(sketch_square_norm: float, unsketched_square_norm: float, gradient_square_norm: float) -> float:
    """cos(G, G A^T A) = ||S||^2 / (||G|| ||S A||): since <G, S A> = ||S||^2, the product is never formed.

    Args:
        sketch_square_norm: ||S||^2.
        unsketched_square_norm: ||S A||^2, from `update_square_norm`.
        gradient_square_norm: ||G||^2, of a gradient that somebody did form for this measurement.

    Returns:
        0 where one of them is 0.
    """
    product = unsketched_square_norm * gradient_square_norm
    return sketch_square_norm / product**0.5 if product > 0.0 else 0.0
