"""One weight of this rank under LoGRA: what a step accumulates of its gradient, the direction made of it, the update.

d rows and k columns of this rank's shard W, R sketch rank, D the direction [d, k]: never formed where it is U A.

Order within a step: `restart`, backwards, sums over ranks (the caller's, of `accumulated`), `prepare` (makes the
direction; nothing of the old state is lost), any number of `product`s for probes, then `apply` or `forget`.

Directions:

    sketch, sgd        U = S                                   D = U A
    sketch, rowadam    U = rows of S scaled (`row_adam`)       D = U A
    dense, sgd         D = G
    dense, rowadam     D = rows of G scaled
    dense, adam        D = m' / (sqrt(v') + eps), bias-corrected moments of G

Tensor parallelism: a column-parallel weight has rows of everything; its rows' norms add up over the ranks. A row-parallel
weight has columns of W; its sketch is the same on every rank once the partial sums are added, its dense gradient is not.

bfloat16 weights need masters (`master_rows`). Left out: weight decay, momentum for sketches.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F

from longstraw.optim.master_rows import MasterRows
from longstraw.optim.projection import Projection
from longstraw.optim.row_adam import row_scales, row_squares, update_row_moment
from longstraw.optim.sketch import WeightSketch, perturbed_linear
from longstraw.optim.update import apply_update, projection_gram, update_square_norm

ROWS_AT_ONCE = 1024
"""Rows of a weight that are updated at a time."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a shard lies in the whole weight. Groups of one rank may be None."""

    columns: int
    """k of the whole weight."""

    column_start: int = 0
    """The shard's first column in the whole weight."""

    split: str = "rows"
    """What tensor parallelism divides, "rows" or "columns"."""

    tp: dist.ProcessGroup | None = None
    """The ranks that hold the other shards."""


@dataclass(frozen=True, kw_only=True)
class AdamRates:
    """Adam's constants, Megatron's flags."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


@dataclass(eq=False, kw_only=True)
class UpdatedWeight:
    """See the module. `sketch` is None for the direction dense, whose gradient the caller hands to `prepare`."""

    name: str
    weight: torch.nn.Parameter
    placement: Placement
    rule: str
    beta2: float = 0.95
    adam: AdamRates = AdamRates()
    sketch: WeightSketch | None = None
    masters: MasterRows | None = None
    moment: torch.Tensor | None = field(init=False, default=None)
    """v of RowAdam, [d]."""

    moments: tuple[torch.Tensor, torch.Tensor] | None = field(init=False, default=None)
    """m and v of Adam, [d, k] each."""

    _gradient: torch.Tensor | None = field(init=False, default=None)
    _row_scale: torch.Tensor | None = field(init=False, default=None)
    _next: tuple[torch.Tensor, ...] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        if self.rule == "rowadam":
            self.moment = torch.zeros(self.weight.shape[0], dtype=wide, device=self.weight.device)
        elif self.rule == "adam":
            self.moments = tuple(torch.zeros(self.weight.shape, dtype=wide, device=self.weight.device) for _ in "mv")

    @property
    def projection(self) -> Projection:
        """Which A."""
        return self.sketch.projection

    def prepare(self, step: int, gradient: torch.Tensor | None = None) -> None:
        """Make the direction from the step's whole sums. step: t, 1 in the first.

        gradient: [d, k] for the direction dense; kept until `apply` or `forget`.
        """
        self._gradient, self._row_scale, self._next = gradient, None, None
        if self.rule == "rowadam":
            values = self.sketch.sketch if self.sketch is not None else gradient
            squares = row_squares(values)
            width = values.shape[1]
            if self.sketch is None and self.placement.split == "columns":
                squares, width = _sum_over(squares, self.placement.tp), self.placement.columns
            moment = update_row_moment(self.moment, squares, width, beta2=self.beta2)
            group = self.placement.tp if self.placement.split == "rows" else None
            self._row_scale = row_scales(moment, squares, step, beta2=self.beta2, group=group)
            self._next = (moment,)
        elif self.rule == "adam":
            rates, (first, second) = self.adam, self.moments
            wide = gradient.to(first.dtype)
            first = torch.lerp(wide, first, rates.beta1)
            second = torch.lerp(wide.square(), second, rates.beta2)
            root = (second / (1.0 - rates.beta2**step)).sqrt_().add_(rates.eps)
            self._gradient = (first / (1.0 - rates.beta1**step)).div_(root)
            self._next = (first, second)

    def gradient_square_norm(self) -> torch.Tensor:
        """||S||^2, or ||G||^2 (before `prepare`'s Adam), of this rank's shard, [] float64."""
        values = self._gradient if self.sketch is None else self.sketch.sketch
        return row_squares(values).sum(dtype=torch.float64)

    def direction_square_norm(self) -> torch.Tensor:
        """||D||^2 of this rank's shard, [] float64; for a row-parallel weight's U A of the whole weight."""
        if self.sketch is not None:
            projection = self.projection
            gram = projection_gram(projection, dtype=self.sketch.sketch.dtype, device=self.weight.device)
            return update_square_norm(self.sketch.sketch, gram, row_scale=self._row_scale)
        total = torch.zeros((), dtype=torch.float64, device=self.weight.device)
        for rows in _slices(self.weight.shape[0]):
            total += self._dense_rows(rows).square().sum(dtype=torch.float64)
        return total

    def weight_square_norm(self) -> torch.Tensor:
        """||W||^2 of this rank's shard, [] float64."""
        total = torch.zeros((), dtype=torch.float64, device=self.weight.device)
        for rows in _slices(self.weight.shape[0]):
            total += self.weight.data[rows].double().square().sum()
        return total

    def product(self, x: torch.Tensor, weight: torch.Tensor, step: float | torch.Tensor) -> torch.Tensor:
        """x (W - step D)^T without forming it, [..., d]; `step` may be a dual number."""
        if self.sketch is not None:
            return perturbed_linear(
                x, weight, self.sketch.sketch, self.projection, -step, row_scale=self._row_scale,
                column_start=self.placement.column_start, packed=self.sketch.packed, limits=self.sketch.limits,
            )
        wide = torch.promote_types(x.dtype, torch.float32)
        moved = F.linear(x.to(wide), self._gradient.to(wide))
        if self._row_scale is not None:
            moved = moved * self._row_scale.to(wide)
        return F.linear(x, weight) - (step * moved).to(x.dtype)

    def moved_weight(self, step: float) -> torch.Tensor:
        """W - step D as a new tensor [d, k] of W's dtype: for a matrix that its layer reads instead of calling."""
        wide = self.weight.data.to(torch.promote_types(self.weight.dtype, torch.float32), copy=True)
        self._subtract(wide, slice(None), step)
        return wide.to(self.weight.dtype)

    @torch.no_grad()
    def apply(self, step: float) -> None:
        """W <- W - step D, and the moments move on. Collective over the ranks that share masters."""
        if self.masters is None:
            self._subtract(self.weight.data, slice(None), step)
        else:
            self.masters.update(self.weight.data, lambda full, rows, low: self._subtract(full, rows, step, low))
        if self.rule == "rowadam":
            (self.moment,) = self._next
        elif self.rule == "adam":
            self.moments = self._next
        self.forget()

    def forget(self) -> None:
        """Drop the direction; the moments stay as they were before `prepare`."""
        self._gradient = self._row_scale = self._next = None

    def factors(self) -> torch.Tensor:
        """U of this rank's rows, [d, R], a copy."""
        sketch = self.sketch.sketch
        return sketch.clone() if self._row_scale is None else sketch * self._row_scale[:, None].to(sketch.dtype)

    def state_tensors(self) -> list[torch.Tensor]:
        """Everything that this weight keeps beside itself, for counting bytes."""
        held = [] if self.sketch is None else [self.sketch.sketch]
        held += [] if self.moment is None else [self.moment]
        held += list(self.moments or ())
        return held + ([] if self.masters is None else [self.masters.rows])

    def _subtract(self, target: torch.Tensor, rows: slice, step: float, low: torch.Tensor | None = None) -> None:
        """target -= step * D[rows], in place; target is float32 or wider, or bfloat16 with its remainder `low`."""
        scale = None if self._row_scale is None else self._row_scale[rows]
        if self.sketch is not None:
            apply_update(
                target, self.sketch.sketch[rows], self.projection, step, row_scale=scale, remainder=low,
                column_start=self.placement.column_start, rows_at_once=ROWS_AT_ONCE, limits=self.sketch.limits,
            )
            return
        first = rows.start or 0
        for part in _slices(target.shape[0]):
            change = self._dense_rows(slice(first + part.start, first + part.stop)).mul_(step)
            MasterRows.subtract(target[part], change, None if low is None else low[part])

    def _dense_rows(self, rows: slice) -> torch.Tensor:
        """Rows of D for the direction dense, a new tensor in float32 or wider."""
        part = self._gradient[rows]
        wide = part.to(torch.promote_types(part.dtype, torch.float32), copy=True)
        return wide if self._row_scale is None else wide.mul_(self._row_scale[rows, None])


def _slices(rows: int) -> list[slice]:
    return [slice(start, min(start + ROWS_AT_ONCE, rows)) for start in range(0, rows, ROWS_AT_ONCE)]


def _sum_over(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(values, group=group)
    return values
