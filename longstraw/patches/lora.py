"""LoRA (low-rank adaptation, arXiv 2106.09685) on a decoder's projection matrices: y = x W^T + scale (x A^T) B^T.

R rank of a pair, d rows and k columns of this rank's shard of a weight W; A [R, k], B [d, R].

The pair of a matrix are two parameters of its linear, `lora_a` and `lora_b`; everything else is frozen. They go the way
of any parameter: Megatron's DDP, Adam and checkpoints. B starts at zero, so that a model with pairs begins as the model
without.

Tensor parallelism cuts one of the pair as it cuts W: of a column-parallel linear the rows of B, of a row-parallel one
the columns of A. The other lies whole on every rank, and its gradient there is a partial sum, which
`finalize_model_grads` adds up once a step. Experts have a pair each and are not cut.

Left out: the matrix that latent attention absorbs into queries and outputs (it is read, its linear never called), and
with it a pair for it; dropout on x; Transformer Engine's linears, whose product is inside one kernel; embeddings,
routers, norms and the sparse indexer.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from longstraw.patches.projections import ProjectionMatrix, find_projections, replace_product, restore_product
from longstraw.patches.verify import require_source

PAIR_NAMES = ("lora_a", "lora_b")


@dataclass(frozen=True, kw_only=True)
class LowRankPair:
    """The pair of one projection matrix, on this rank."""

    matrix: ProjectionMatrix

    @property
    def a(self) -> torch.nn.Parameter:
        """[R, k]."""
        return self.matrix.module.lora_a

    @property
    def b(self) -> torch.nn.Parameter:
        """[d, R]."""
        return self.matrix.module.lora_b

    @property
    def alpha(self) -> float:
        """What the pair's product is multiplied by, times R."""
        return self.matrix.module.lora_alpha

    @property
    def scale(self) -> float:
        """alpha / R."""
        return self.alpha / self.a.shape[0]


def is_pair(name: str) -> bool:
    """Whether a parameter, or a section of one in a checkpoint, is one of a pair."""
    return any(part in PAIR_NAMES for part in name.split("."))


def add_pairs(model: torch.nn.Module, rank: int, alpha: float) -> list[LowRankPair]:
    """Freeze the model and give every called projection matrix a pair, both of zeros; the caller draws A.

    Before DDP is built around the model. A pair has its weight's dtype and device, and is reduced over the same ranks.

    Raises:
        ValueError: no matrix is there to adapt, or the rank is above the rows or columns of one.
    """
    matrices, parents = [m for m in find_projections(model) if m.called], dict(model.named_modules())
    if not matrices:
        raise ValueError("--lora-rank finds no projection matrix in the model: build it with --transformer-impl local")
    for matrix in matrices:
        rows, columns = matrix.module.output_size, matrix.module.input_size
        if rank > min(rows, columns):
            raise ValueError(
                f"--lora-rank {rank} is above the {min(rows, columns)} {'rows' if rows < columns else 'columns'} of "
                f"{matrix.name} [{rows}, {columns}]: no update of it has a higher rank than that"
            )
    model.requires_grad_(False)
    for matrix in matrices:
        module, weight = matrix.module, matrix.weight
        module.lora_alpha = alpha
        module.lora_a = torch.nn.Parameter(weight.new_zeros(rank, weight.shape[1]))
        module.lora_b = torch.nn.Parameter(weight.new_zeros(weight.shape[0], rank))
        cut, dim = _cut_of(matrix)
        set_tensor_model_parallel_attributes(getattr(module, cut), True, dim, 1)
        for name in PAIR_NAMES:
            parameter = getattr(module, name)
            parameter.allreduce = getattr(weight, "allreduce", True)
            parameter.partial_over_tp = name != cut and module.tp_group.size() > 1
        replace_product(matrix, _product_of(module))
        parent, _, own = matrix.name.removesuffix(".weight").rpartition(".")
        _save_pair(matrix, _sections_of(parents[parent], own, module.lora_b))
    return find_pairs(model)


def find_pairs(model: torch.nn.Module) -> list[LowRankPair]:
    """The pairs of a model, in the model's order; none where it has none."""
    if not any(hasattr(module, "lora_a") for module in model.modules()):
        return []  # also of models whose matrices could not have any
    return [LowRankPair(matrix=matrix) for matrix in find_projections(model) if hasattr(matrix.module, "lora_a")]


@torch.no_grad()
def silence_pairs(model: torch.nn.Module) -> None:
    """Set every B to zero: the model is its frozen weights."""
    for pair in find_pairs(model):
        pair.b.zero_()


@torch.no_grad()
def merge_pairs(model: torch.nn.Module) -> int:
    """W <- W + scale B A, rounded once to W's dtype, and take the pairs out again; returns how many there were."""
    pairs = find_pairs(model)
    for pair in pairs:
        weight, module = pair.matrix.weight, pair.matrix.module
        wide = torch.promote_types(weight.dtype, torch.float32)
        weight.copy_(weight.to(wide) + pair.scale * (pair.b.to(wide) @ pair.a.to(wide)))
        restore_product(pair.matrix)
        del module.lora_a, module.lora_b, module.lora_alpha, module.sharded_state_dict
    return len(pairs)


def _product_of(module: torch.nn.Module):
    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        projected = F.linear(x, module.lora_a) * (module.lora_alpha / module.lora_a.shape[0])
        return F.linear(x, weight) + F.linear(projected, module.lora_b)

    return product


def _cut_of(matrix: ProjectionMatrix) -> tuple[str, int]:
    """Which of the pair tensor parallelism cuts, and along which dimension."""
    return ("lora_b", 0) if matrix.split == "rows" else ("lora_a", 1)


def _sections_of(parent: torch.nn.Module, own: str, b: torch.Tensor) -> dict[str, int]:
    """Name -> rows of this rank's sections of a B whose weight has several (gate and up; q, k, v and more), each of
    which is cut over tensor parallelism: else another size would read the rows in another order."""
    if isinstance(parent, MLP) and own == "linear_fc1" and parent.config.gated_linear_unit:
        return dict.fromkeys(("gate", "up"), b.shape[0] // 2)
    if isinstance(parent, GatedDeltaNet) and own == "in_proj":
        return dict(zip(parent.in_proj_split_names, parent.in_proj_split_sections))
    return {}


def _save_pair(matrix: ProjectionMatrix, sections: dict[str, int]) -> None:
    """Let the linear's sharded state dict say how its pair is cut."""
    module, (cut, dim) = matrix.module, _cut_of(matrix)
    require_source(type(module).sharded_state_dict, "make_sharded_tensors_for_checkpoint", "metadata['dp_cp_group']")

    def sharded_state_dict(prefix="", sharded_offsets=(), metadata=None):
        state = type(module).sharded_state_dict(module, prefix, sharded_offsets, metadata)
        own = make_sharded_tensors_for_checkpoint(
            {cut: getattr(module, cut)}, prefix, {cut: dim}, sharded_offsets, tp_group=module.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        key = f"{prefix}{cut}"
        if sections:
            own[key] = _split_tensor_factory(own[key], list(sections.values()), list(sections), 0)
        return state | own

    module.sharded_state_dict = sharded_state_dict
