"""Gradient sketches: S = dY^T (X A^T), accumulated over every backward of a step; the gradient is never formed.

T tokens of a call, d rows and k columns of this rank's shard of a weight W, R sketch rank, A [R, k of the whole W].

The gradient of y = x W^T is G = dY^T X [d, k]. Its sketch G A^T is [d, R] whatever the shape of W: the projection is
always on the right, the side of the inputs, and never chosen by comparing d with k. Multiplying from the right first
costs R / d of the gradient's products.

Sums are float32, float64 for float64 inputs. 16-bit inputs are multiplied as they are where the device adds the
products in float32, and widened first elsewhere.

Tensor parallelism: a column-parallel weight holds rows of W, hence the same rows of S, complete. A row-parallel weight
holds columns of W from `column_start` on and uses A's same columns; its S [d, R] is a partial sum to be added over TP.
Experts are weights like any other, a sketch each, by the expert's number among all. Data and context parallelism add
sketches once, at the end of the step (`all_reduce_sketches`).

Left out: a bias (its gradient is a vector and not sketched), weights stored [k, d], the gradient of a gradient.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from longstraw.attention import device_kind
from longstraw.attention.wide_heads import matmul_wide
from longstraw.memory_scopes import memory_scope
from longstraw.optim.projection import PackedColumns, Projection, pack_columns, project_columns, unscaled_columns

HALF_TYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class BlockLimits:
    """How much exists at once. The peak of a call is a few times these."""

    tokens: int = 4096
    """Rows of X and dY that are multiplied at a time."""

    entries: int = 2**20
    """Entries of A that are made at a time."""

    def columns(self, projection: Projection) -> int:
        """Columns of A to make at a time: a multiple of those that share a counter, at least one such block."""
        width = projection.block_columns
        return max(1, self.entries // projection.rank // width) * width


@dataclass(kw_only=True)
class WeightSketch:
    """The accumulator of one weight's shard: its S, and which A and which columns of it belong to the shard."""

    projection: Projection
    sketch: torch.Tensor
    """S, [d, R] float32 (float64 for a float64 weight)."""

    columns: int
    """Columns of the shard."""

    column_start: int = 0
    limits: BlockLimits = BlockLimits()
    packed: PackedColumns | None = field(init=False, default=None)
    """A's drawn words, from the first addition of a draw on; only of a Rademacher matrix (1 bit an entry)."""

    dense: torch.Tensor | None = field(init=False, default=None)
    """The whole gradient [d, k] beside its sketch, where somebody asked for it to compare."""

    anchor: torch.Tensor = field(init=False)
    """An empty leaf that asks for a gradient and never gets one: so the backward of `sketched_linear` runs also where
    neither the weight nor the input takes a gradient."""

    def __post_init__(self) -> None:
        if self.sketch.dim() != 2 or self.sketch.shape[1] != self.projection.rank:
            raise ValueError(
                f"The sketch of {self.projection.name} must be [d, {self.projection.rank}], got "
                f"{list(self.sketch.shape)}."
            )
        self.anchor = torch.empty(0, device=self.sketch.device, requires_grad=True)

    def keep_dense(self) -> None:
        """Form the gradient too, from now on: for measuring what a sketch loses of it."""
        shape = (self.sketch.shape[0], self.columns)
        self.dense = torch.zeros(shape, dtype=self.sketch.dtype, device=self.sketch.device)

    @torch.no_grad()
    def add(self, grad_output: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add one backward's part. grad_output [..., d], inputs [..., k] of this shard; no tokens are allowed."""
        if self.packed is None and self.projection.kind == "rademacher":
            stop = self.column_start + self.columns
            with memory_scope("gradients"):
                self.packed = pack_columns(self.projection, self.column_start, stop, self.sketch.device)
        add_to_sketch(
            self.sketch, grad_output.flatten(0, -2), inputs.flatten(0, -2), self.projection,
            column_start=self.column_start, limits=self.limits, packed=self.packed,
        )  # fmt: skip
        if self.dense is not None:
            self.dense += grad_output.flatten(0, -2).to(self.dense.dtype).t() @ inputs.flatten(0, -2).to(self.dense.dtype)

    @torch.no_grad()
    def add_gradient(self, gradient: torch.Tensor) -> None:
        """Add a part of the gradient [d, k] that a caller did form, of one block: for weights that no linear multiplies."""
        wide = self.sketch.dtype
        blocks = blocks_of_columns(
            self.projection, self.column_start, self.columns, self.limits, wide, gradient.device, self.packed
        )
        for columns, entries in blocks:
            self.sketch.addmm_(gradient[:, columns].to(wide), entries.t(), alpha=self.projection.scale)
        if self.dense is not None:
            self.dense += gradient.to(wide)

    def restart(self, draw: int) -> None:
        """Zero S and go on with the given draw of A: the start of a step."""
        self.sketch.zero_()
        if self.dense is not None:
            self.dense.zero_()
        if draw != self.projection.draw:
            self.projection, self.packed = replace(self.projection, draw=draw), None


def open_sketch(
    weight: torch.Tensor, projection: Projection, *, column_start: int = 0, limits: BlockLimits = BlockLimits()
) -> WeightSketch:
    """A zero sketch for this rank's shard [d, k] of a weight.

    column_start: this shard's first column in the whole weight; not 0 only for row-parallel weights.

    Raises:
        ValueError: the shard is no matrix, or does not lie in the projection's columns.
    """
    if weight.dim() != 2:
        raise ValueError(f"Only matrices are sketched; {projection.name} is {list(weight.shape)}.")
    if not 0 <= column_start <= column_start + weight.shape[1] <= projection.columns:
        raise ValueError(
            f"Columns [{column_start}, {column_start + weight.shape[1]}) of {projection.name} do not lie in its "
            f"{projection.columns} columns."
        )
    dtype = torch.promote_types(weight.dtype, torch.float32)
    sketch = torch.zeros(weight.shape[0], projection.rank, dtype=dtype, device=weight.device)
    return WeightSketch(
        projection=projection, sketch=sketch, columns=weight.shape[1], column_start=column_start, limits=limits
    )


def sketched_linear(x: torch.Tensor, weight: torch.Tensor, accumulator: WeightSketch) -> torch.Tensor:
    """x W^T, whose backward gives dX and adds the weight's gradient to the accumulator, as a sketch.

    The weight gets no gradient: `weight.grad` stays None, whether or not it asks for one.

    Args:
        x: [..., k] of this rank's columns.
        weight: [d, k], this rank's shard.

    Returns:
        [..., d]; for a row-parallel weight this rank's partial sum. The gradient of x is this rank's too: for a
        column-parallel weight the caller sums it over TP, as for any linear.

    Raises:
        ValueError: x, weight and sketch do not fit.
    """
    shard = [accumulator.sketch.shape[0], accumulator.columns]
    if list(weight.shape) != shard or x.shape[-1] != shard[1]:
        raise ValueError(
            f"x [..., k] {list(x.shape)}, weight [d, k] {list(weight.shape)} and the sketch of a {shard} shard of "
            f"{accumulator.projection.name} do not fit."
        )
    return _SketchedLinear.apply(x, weight, accumulator.anchor, accumulator)


class _SketchedLinear(torch.autograd.Function):
    """Saves the inputs. The accumulator holds nothing of the graph."""

    @staticmethod
    def forward(ctx, x, weight, anchor, accumulator):
        ctx.save_for_backward(x, weight)
        ctx.accumulator = accumulator
        return F.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        x, weight = ctx.saved_tensors
        ctx.accumulator.add(grad_output, x)
        return grad_output.matmul(weight) if ctx.needs_input_grad[0] else None, None, None, None


def perturbed_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    direction: torch.Tensor,
    projection: Projection,
    step: float | torch.Tensor,
    *,
    row_scale: torch.Tensor | None = None,
    column_start: int = 0,
    limits: BlockLimits = BlockLimits(),
    packed: PackedColumns | None = None,
) -> torch.Tensor:
    """x (W + step * U A)^T without forming W + step * U A: for probes, which never touch the weights.

    With a number for `step` it is the finite-difference probe. With a dual scalar of value 0 and tangent 1
    (forward-mode autograd) the result's tangent is the derivative along U A plus what x's tangent adds: the JVP probe.

    Args:
        x: [..., k] of this rank's columns; it may be dual.
        weight: [d, k]; direction: U [d, R], or with `row_scale` [d] what it scales to U.

    Returns:
        [..., d] in x's dtype; for a row-parallel weight this rank's partial sum.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    projected = None
    blocks = blocks_of_columns(projection, column_start, weight.shape[1], limits, wide, x.device, packed)
    for columns, entries in blocks:
        part = x[..., columns].to(wide) @ entries.t()
        projected = part if projected is None else projected + part
    moved = (projected * projection.scale) @ direction.to(wide).t()
    if row_scale is not None:
        moved = moved * row_scale.to(wide)
    return F.linear(x, weight) + (step * moved).to(x.dtype)


def add_to_sketch(
    sketch: torch.Tensor,
    grad_output: torch.Tensor,
    inputs: torch.Tensor,
    projection: Projection,
    *,
    column_start: int = 0,
    limits: BlockLimits = BlockLimits(),
    packed: PackedColumns | None = None,
) -> None:
    """sketch += grad_output^T (inputs A^T), in place, a block of tokens and of columns at a time.

    Args:
        sketch: [d, R].
        grad_output: [T, d]; inputs: [T, k], whose columns are A's from column_start on. T may be 0.
        packed: A's drawn words of these columns, if they were kept.

    Raises:
        ValueError: shapes do not fit.
    """
    tokens, columns = inputs.shape
    if grad_output.shape != (tokens, sketch.shape[0]) or sketch.shape[1] != projection.rank:
        raise ValueError(
            f"A sketch {list(sketch.shape)} at rank {projection.rank} takes gradients [T, {sketch.shape[0]}] of inputs "
            f"[T, k], got {list(grad_output.shape)} and {list(inputs.shape)}."
        )
    exact_in_half = projection.kind == "rademacher" and inputs.dtype in HALF_TYPES
    dtype = inputs.dtype if exact_in_half else torch.promote_types(inputs.dtype, torch.float32)
    for start in range(0, tokens, limits.tokens):
        some = slice(start, start + limits.tokens)
        projected = torch.zeros(len(inputs[some]), projection.rank, dtype=sketch.dtype, device=sketch.device)
        for part, entries in blocks_of_columns(projection, column_start, columns, limits, dtype, inputs.device, packed):
            projected += _multiply(inputs[some, part], entries.t())
        sketch += multiply_transposed(grad_output[some], projected.mul_(projection.scale))


def _multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in float32 or wider; 16-bit operands on a CUDA device stay 16-bit, with float32 sums."""
    if device_kind.computes_on_cuda(a) and a.dtype in HALF_TYPES:
        return matmul_wide(a[None], b[None])[0]
    wide = torch.promote_types(a.dtype, torch.float32)
    return a.to(wide) @ b.to(wide)


def multiply_transposed(narrow: torch.Tensor, wide: torch.Tensor, *, in_halves: bool | None = None) -> torch.Tensor:
    """narrow [T, d] transposed times wide [T, R], in wide's dtype.

    in_halves: keep bfloat16 operands as they are, with the float32 one as a sum of two bfloat16 (2^-17 of it is lost,
    an ordinary cast loses 2^-9); None does so on CUDA devices, which multiply those many times faster.
    """
    if in_halves is None:
        in_halves = device_kind.computes_on_cuda(narrow)
    if narrow.dtype != torch.bfloat16 or not in_halves:
        return narrow.t().to(wide.dtype) @ wide
    high = wide.to(torch.bfloat16)
    halves = torch.cat([high, (wide - high).to(torch.bfloat16)], 1)
    first, second = _multiply(narrow.t(), halves).to(wide.dtype).chunk(2, 1)
    return first + second


def blocks_of_columns(
    projection: Projection,
    column_start: int,
    columns: int,
    limits: BlockLimits,
    dtype: torch.dtype,
    device: torch.device | str,
    packed: PackedColumns | None = None,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """(columns of the shard, those of the unscaled B [R, n]), a bounded piece at a time."""
    step = limits.columns(projection)
    for start in range(0, columns, step):
        stop = min(start + step, columns)
        piece = (column_start + start, column_start + stop)
        if packed is None:
            yield slice(start, stop), unscaled_columns(projection, *piece, dtype=dtype, device=device)
        else:
            yield slice(start, stop), packed.entries(*piece, dtype)


def naive_sketch(
    grad_output: torch.Tensor, inputs: torch.Tensor, projection: Projection, *, column_start: int = 0
) -> torch.Tensor:
    """The specification: the whole gradient times the whole of A's columns. Arguments as `add_to_sketch`."""
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    gradient = grad_output.to(dtype).t() @ inputs.to(dtype)
    stop = column_start + inputs.shape[1]
    return gradient @ project_columns(projection, column_start, stop, dtype=dtype, device=inputs.device).t()


def all_reduce_sketches(sketches: Iterable[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Add sketches over the ranks of a group, in place: data and context parallelism, or TP for partial sums.

    Every rank gives the same sketches in the same order, those of experts that no token reached too. None is one rank.
    """
    if group is None or group.size() == 1:
        return
    for sketch in sketches:
        dist.all_reduce(sketch, group=group)
