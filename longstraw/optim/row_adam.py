"""RowAdam: a second moment for each output row of a weight, which survives a new draw of A.

d rows of this rank's shard, R columns of the sketch S [d, R].

    v_i   <- beta2 v_i + (1 - beta2) mean_j S_ij^2
    s_i   =  1 / sqrt(v_i / (1 - beta2^t))                       no first moment
    U     =  c s_i S_ij,   c such that ||U|| = ||S||             Frobenius, over the whole weight

Elementwise moments would be in the coordinates of one A and mean nothing under the next; a row's mean square estimates
that row's ||G_i||^2 / R under every A.

Everything follows from the rows' sums of squares [d], so U is never formed: it is S with a number a row, and the weight
update takes both. No constant is added to the root: v holds the present square, so no entry of s S exceeds
sqrt(R / (1 - beta2)), and rows that never had a gradient get 0. The direction so scales exactly with S.

State: v [d] float32 and the count t. The functions return a new v and leave the old one alone, so a refused step has
nothing to undo.

Left out: a first moment, weight decay, elementwise moments.
"""

import torch
import torch.distributed as dist


@torch.no_grad()
def row_squares(sketch: torch.Tensor, *, rows_at_once: int = 4096) -> torch.Tensor:
    """Sum of squares of each row of [d, R]: [d], in float32 (float64 for float64), a slice of rows at a time."""
    sums = [part.square().sum(1) for part in sketch.split(rows_at_once)]
    return torch.cat(sums) if sums else sketch.new_zeros(0)


def update_row_moment(moment: torch.Tensor, squares: torch.Tensor, rank: int, *, beta2: float = 0.95) -> torch.Tensor:
    """The new v [d], float32 (float64 stays). moment: the old one, zeros before the first step; squares: [d]."""
    if moment.shape != squares.shape:
        raise ValueError(
            f"The row moments {list(moment.shape)} are those of another weight: its sketch has {len(squares)} rows."
        )
    return torch.lerp(squares.to(moment.dtype) / rank, moment, beta2)


@torch.no_grad()
def row_scales(
    moment: torch.Tensor,
    squares: torch.Tensor,
    step: int,
    *,
    beta2: float = 0.95,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """What each row of S is multiplied by to be U, [d], in the dtype of moment.

    Args:
        moment: v after this step's update, [d].
        squares: the rows' sums of squares of this step, [d].
        step: t, 1 in the first step.
        group: the ranks that share the weight's rows (TP, of a column-parallel weight), for the norm; None is one rank,
            also where every rank has all rows.

    Raises:
        ValueError: step counts from 1.
    """
    if step < 1:
        raise ValueError(f"RowAdam counts its steps from 1, got {step}.")
    corrected = moment / (1.0 - beta2**step)
    scale = torch.where(corrected > 0, corrected.rsqrt(), 0.0)
    # In float64: squares of float32 gradients of a large model come near the end of float32's range.
    squares, wide = squares.double(), scale.double()
    norms = torch.stack([squares.sum(), (wide.square() * squares).sum()])
    if group is not None and group.size() > 1:
        dist.all_reduce(norms, group=group)
    before, after = norms.unbind()
    return (wide * torch.where(after > 0, (before / after).sqrt(), 0.0)).to(moment.dtype)


def naive_row_adam(
    sketch: torch.Tensor, moment: torch.Tensor, step: int, beta2: float = 0.95
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification: (U [d, R], new v [d])."""
    moment = beta2 * moment + (1 - beta2) * sketch.square().mean(1)
    root = (moment / (1 - beta2**step)).sqrt()[:, None]
    direction = torch.where(root > 0, sketch / root, torch.zeros_like(sketch))
    norm = direction.norm()
    return direction * (sketch.norm() / norm if norm > 0 else 0.0), moment
