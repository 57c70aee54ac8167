"""The linear layers of the layer specs: Transformer Engine's where it is asked for, else Megatron's own.

Megatron has a replicated linear (the sparse indexer's projections) on Transformer Engine only, so here is one.
"""

from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig


class ReplicatedLinear(torch.nn.Module):
    """x [..., in] @ weight.T -> ([..., out], None); every tensor-parallel rank holds the same whole weight [out, in].

    Built with the keywords of Transformer Engine's `TELinear`. Raises ValueError for what that one alone can do.
    """

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, init_method, bias: bool = False,
        parallel_mode: str = "duplicated", skip_bias_add: bool = False, skip_weight_param_allocation: bool = False,
        is_expert: bool = False, **_,
    ):
        super().__init__()
        if bias or skip_weight_param_allocation or is_expert or parallel_mode != "duplicated":
            raise ValueError("a replicated linear has one whole weight and no bias")
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, device=device, dtype=config.params_dtype))
        if config.perform_initialization:
            init_method(self.weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The product, and no bias: Megatron's linears return both."""
        return torch.nn.functional.linear(x, self.weight), None


@dataclass(frozen=True)
class Linears:
    """The classes for weights cut by rows of the output, by columns of the input, and not at all."""

    column: type
    row: type
    replicated: type


def pick_linears(config: TransformerConfig) -> Linears:
    """Transformer Engine's linears where it is asked for, else Megatron's own.

    Raises ImportError when `--transformer-impl transformer_engine` is set and Transformer Engine is not installed.
    """
    if config.transformer_impl != "transformer_engine":
        return Linears(ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)
    from megatron.core.extensions import transformer_engine as te

    if not te.HAVE_TE:
        raise ImportError("--transformer-impl transformer_engine needs Transformer Engine; use --transformer-impl local")
    return Linears(te.TEColumnParallelLinear, te.TERowParallelLinear, te.TELinear)
