"""LoGRA over all projection matrices of a rank: accumulate, sum over ranks, measure, go a step of the right size.

A step:

    logra.restart(number)                     # a new A where it is due, sketches at zero
    ...                                       # backwards add to the sketches (or to dense gradients)
    logra.reduce()                            # sums over ranks, once
    names = logra.find_nonfinite()
    direction = logra.prepare()               # norms, and eta: the length at alpha 1
    logra.apply(alpha * direction.eta)        # or logra.forget(): nothing has moved

One eta serves all matrices: alpha eta D with ||eta D|| = --logra-update-ratio ||W||, both norms over all of them, so that
the direction stays the gradient's. Sketches lie in one buffer for each kind of sum, which is the reduction's payload.

Left out: which weights of a model these are, and how their sketches are added to (the caller's).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from longstraw.optim.config import LograConfig
from longstraw.optim.step_control import ratio_step
from longstraw.optim.updated_weight import UpdatedWeight


@dataclass(frozen=True, kw_only=True)
class RankGroups:
    """The ranks of each sum. None is one rank.

    copies: those that hold the same dense weights (data x context parallelism). expert_copies: the same experts. tp: the
    shards of dense weights. experts: the other experts and their shards.
    """

    copies: dist.ProcessGroup | None = None
    expert_copies: dist.ProcessGroup | None = None
    tp: dist.ProcessGroup | None = None
    experts: dist.ProcessGroup | None = None
    world: dist.ProcessGroup | None = None


@dataclass(frozen=True, kw_only=True)
class StepDirection:
    """What `prepare` found, equal on every rank."""

    eta: float
    """Length of a step at alpha 1: W moves by eta D."""

    gradient_norm: float
    """||S|| or ||G|| over all matrices."""

    direction_norm: float
    """||D|| over all matrices."""

    weight_norm: float
    """||W|| over all matrices."""


@dataclass(frozen=True)
class _Member:
    weight: UpdatedWeight
    expert: bool


def open_sketch_buffers(
    shapes: Sequence[tuple[str, int, int]], dtype: torch.dtype, device: torch.device
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Zero sketches [d, R] as views of one buffer for each kind: ({kind: buffer}, views in order).

    shapes: (kind, d, R) of each sketch.
    """
    sizes: dict[str, int] = {}
    for kind, rows, rank in shapes:
        sizes[kind] = sizes.get(kind, 0) + rows * rank
    buffers = {kind: torch.zeros(size, dtype=dtype, device=device) for kind, size in sizes.items()}
    taken, views = dict.fromkeys(sizes, 0), []
    for kind, rows, rank in shapes:
        start, taken[kind] = taken[kind], taken[kind] + rows * rank
        views.append(buffers[kind][start : taken[kind]].view(rows, rank))
    return buffers, views


class Logra:
    """The projection matrices of this rank under one configuration.

    weights: (matrix, whether it is an expert's), in the same order on every rank that holds the same ones.
    buffers: from `open_sketch_buffers`, kinds "rows", "columns" and "expert"; empty for the direction dense.
    """

    def __init__(
        self, config: LograConfig, weights: Sequence[tuple[UpdatedWeight, bool]], buffers: dict[str, torch.Tensor],
        groups: RankGroups,
    ):
        self.config, self.buffers, self.groups = config, buffers, groups
        self._members = [_Member(weight, expert) for weight, expert in weights]
        self.steps_taken = 0
        """t of RowAdam and Adam: updates that were applied."""

    @property
    def weights(self) -> list[UpdatedWeight]:
        """The matrices, in the model's order."""
        return [member.weight for member in self._members]

    def restart(self, step: int) -> None:
        """Zero the sketches and take the draw of A of optimizer step `step`, counted from 0."""
        for weight in self.weights:
            if weight.sketch is not None:
                weight.sketch.restart(self.config.draw(step))

    def reduce(self) -> None:
        """Add the sketches over the ranks, once a step. Collective; dense gradients are summed by their own owner."""
        for kind, groups in (("rows", ["copies"]), ("columns", ["copies", "tp"]), ("expert", ["expert_copies"])):
            for name in groups:
                group = getattr(self.groups, name)
                if kind in self.buffers and group is not None and group.size() > 1:
                    dist.all_reduce(self.buffers[kind], group=group)
        for member in self._members:
            group = self.groups.expert_copies if member.expert else self.groups.copies
            watched = member.weight.sketch is not None and member.weight.sketch.dense is not None
            if watched and group is not None and group.size() > 1:
                dist.all_reduce(member.weight.sketch.dense, group=group)

    def find_nonfinite(self) -> list[str]:
        """Names of the matrices whose sketch holds a NaN or an infinity, on any rank. Collective; sorted."""
        found = [w.name for w in self.weights if w.sketch is not None and not _all_finite(w.sketch.sketch)]
        if self.groups.world is None or self.groups.world.size() == 1:
            return sorted(found)
        gathered: list = [None] * self.groups.world.size()
        dist.all_gather_object(gathered, found, group=self.groups.world)
        return sorted(set().union(*gathered))

    def prepare(self, gradients: dict[str, torch.Tensor] | None = None) -> StepDirection:
        """Make the direction of every matrix and measure it. Collective; equal on every rank.

        gradients: name -> [d, k], for the direction dense. Raises StepControlError where a norm is not finite.
        """
        norms = []
        for member in self._members:
            weight = member.weight
            weight.prepare(self.steps_taken + 1, None if gradients is None else gradients[weight.name])
            gradient = gradients[weight.name].double().square().sum() if gradients else weight.gradient_square_norm()
            norms.append(torch.stack([gradient, weight.direction_square_norm(), weight.weight_square_norm()]))
        gradient, direction, weight = self._sum_norms(norms).tolist()
        eta = 1.0
        if self.config.update_step_size != "learning-rate":
            eta = ratio_step(weight, direction, self.config.logra_update_ratio)
        return StepDirection(
            eta=eta, gradient_norm=gradient**0.5, direction_norm=direction**0.5, weight_norm=weight**0.5
        )

    def _sum_norms(self, norms: list[torch.Tensor]) -> torch.Tensor:
        """Square norms [3] over all matrices of all ranks, each shard counted once.

        A row-parallel sketch, and its direction, are whole on every rank of TP; its weight is not.
        """
        device = norms[0].device
        shared, own, experts = (torch.zeros(3, dtype=torch.float64, device=device) for _ in range(3))
        for member, found in zip(self._members, norms):
            if member.expert:
                experts += found
            elif member.weight.sketch is not None and member.weight.placement.split == "columns":
                shared[:2] += found[:2]
                own[2] += found[2]
            else:
                own += found
        for values, group in ((own, self.groups.tp), (experts, self.groups.experts)):
            if group is not None and group.size() > 1:
                dist.all_reduce(values, group=group)
        return shared + own + experts

    def apply(self, step: float) -> None:
        """W <- W - step D for every matrix, and the moments move on. Collective where masters are shared out."""
        for weight in self.weights:
            weight.apply(step)
        self.steps_taken += 1

    def forget(self) -> None:
        """Give the step up: weights and moments stay."""
        for weight in self.weights:
            weight.forget()

    def state_bytes(self) -> dict[str, int]:
        """Bytes on the weights' device by category: "sketches" (with gradients that are formed to compare), "optimizer" for
        moments and masters, "projections" for the drawn words of A."""
        found = dict.fromkeys(("sketches", "optimizer", "projections"), 0)
        found["sketches"] = sum(buffer.nbytes for buffer in self.buffers.values())
        for weight in self.weights:
            sketch = weight.sketch
            for tensor in weight.state_tensors():
                if tensor.device == weight.weight.device and (sketch is None or tensor is not sketch.sketch):
                    found["optimizer"] += tensor.nbytes
            if sketch is not None and sketch.dense is not None:
                found["sketches"] += sketch.dense.nbytes
            if sketch is not None and sketch.packed is not None:
                found["projections"] += sum(t.nbytes for t in (sketch.packed.words, *sketch.packed.tables.values()))
        return found


def _all_finite(values: torch.Tensor) -> bool:
    if not values.numel():
        return True
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) and torch.isfinite(high))
