"""The projection matrices of a decoder, and how their product with the input is replaced.

Projections are the linears of attention, gated delta nets, MLPs and experts: what LoGRA sketches and LoRA adapts. The
sparse indexer's, routers and the vocabulary's matrices are not among them.

A Megatron linear does its product in one method, `_forward_impl`, between the collectives of tensor parallelism; a
replacement gets the input as that method does and leaves the collectives where they are.

    replace_product(matrix, lambda x, weight: sketched_linear(x, weight, accumulator))

Left out: Transformer Engine's linears, whose product is inside one kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttention
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexer

from longstraw.attention.dual import apply_linear
from longstraw.patches.verify import require_source

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(x [..., k], weight [d, k]) -> [..., d], both of this rank."""


@dataclass(frozen=True, kw_only=True)
class ProjectionMatrix:
    """One weight [d, k] of this rank. The parameter is replaced in place, never by another object."""

    name: str
    """The parameter's name in this rank's model; an expert's number is this rank's."""

    module: torch.nn.Module
    """The linear."""

    split: Literal["rows", "columns"]
    """What tensor parallelism divides: the outputs (column-parallel linears) or the inputs (row-parallel ones)."""

    expert: bool
    """Whether it belongs to one routed expert, which only some ranks hold."""

    called: bool
    """Whether the linear is called; a matrix that latent attention absorbs into queries and outputs is only read."""

    @property
    def weight(self) -> torch.nn.Parameter:
        """[d, k]."""
        return self.module.weight


def find_projections(model: torch.nn.Module) -> list[ProjectionMatrix]:
    """The projection matrices of a model's decoder, in the model's order, which is every rank's.

    Raises:
        ValueError: a matrix belongs to two modules, or experts are grouped into one tensor.
    """
    modules = dict(model.named_modules())
    skipped = {id(m) for indexer in modules.values() if isinstance(indexer, DSAIndexer) for m in indexer.modules()}
    absorbed = {id(m.linear_kv_up_proj) for m in modules.values() if isinstance(m, AbsorbedMLASelfAttention)}
    found, owner = [], {}
    for path, module in modules.items():
        if not path.startswith("decoder.layers.") or id(module) in skipped:
            continue
        if type(module).__name__ in ("TEGroupedMLP", "GroupedMLP"):
            raise ValueError(f"the experts of {path} share one product: train them without --moe-grouped-gemm")
        if not isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            continue
        name = f"{path}.weight"
        first = owner.setdefault(id(module.weight), name)
        if first != name:
            raise ValueError(f"{first} and {name} are one weight: a weight that two modules share is not supported")
        found.append(ProjectionMatrix(
            name=name, module=module, split="rows" if isinstance(module, ColumnParallelLinear) else "columns",
            expert=".experts.local_experts." in path, called=id(module) not in absorbed,
        ))  # fmt: skip
    return found


def replace_product(matrix: ProjectionMatrix, product: Product) -> None:
    """Let the linear compute `product(x, weight)` from now on, x with all of its tokens (gathered under sequence
    parallelism). `restore_product` undoes it.

    Raises:
        ValueError: the linear is never called, so a replacement would have no effect.
    """
    require_source(type(matrix.module)._forward_impl, "weight.requires_grad", "linear_with_frozen_weight(input, weight")
    if not matrix.called:
        raise ValueError(f"{matrix.name} is read by its layer, which never calls the linear")

    def forward_impl(
        input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, tp_group,
        grad_output_buffer=None, wgrad_deferral_limit=None, gtp_remat_size=1,
    ):
        if sequence_parallel:  # the backward of each of these sums the input's gradient over tensor parallelism
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        output = product(input, weight)
        return output if bias is None else output + bias

    matrix.module._forward_impl = forward_impl


def replace_dual_product(matrix: ProjectionMatrix, product: Product) -> None:
    """As `replace_product`, in forward mode: the collectives of Megatron's linears have no forward-mode rules, so the
    linear's whole forward is replaced, with collectives that have them."""
    linear = matrix.module
    group = linear.tp_group

    def forward(input_):
        x = input_
        if matrix.split == "rows" and linear.sequence_parallel:
            x = apply_linear(lambda t: _gather_rows(t, group), x)
        y = product(x, linear.weight)
        if matrix.split == "columns" and group.size() > 1 and not linear.explicit_expert_comm:
            exchange = _scatter_sum if linear.sequence_parallel else _sum
            y = apply_linear(lambda t: exchange(t, group), y)
        if linear.bias is None or linear.skip_bias_add:
            return y, linear.bias
        return y + linear.bias, None

    linear.forward = forward


def _gather_rows(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def _sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def _scatter_sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _sum(x, group).chunk(group.size())[group.rank()]


def restore_product(matrix: ProjectionMatrix) -> None:
    """Let the linear compute as its class does."""
    vars(matrix.module).pop("_forward_impl", None)
    vars(matrix.module).pop("forward", None)
