"""The decoder block of every supported model, from Megatron's own modules.

Megatron builds a hybrid block (gated delta net + full attention) only on Transformer Engine. This builds the same block
for any backend, with one naming of parameters: norms are modules of their own (`input_layernorm.weight`), never fused
into the following linear. What is swapped is stated by the two arguments of `build_decoder_spec`: the core attention
and the gated delta net; Megatron's own classes give the conventional model, ours the stateful one.

Left out: MoE and multi-latent attention.
"""

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from longstraw.patches.norms import GatedOutputNorm, RMSNorm


def pick_linears(config: TransformerConfig) -> tuple[type, type]:
    """(column-parallel, row-parallel) linear classes: Transformer Engine's where it is asked for, else Megatron's.

    Raises ImportError when `--transformer-impl transformer_engine` is set and Transformer Engine is not installed.
    """
    if config.transformer_impl != "transformer_engine":
        return ColumnParallelLinear, RowParallelLinear
    from megatron.core.extensions import transformer_engine as te

    if not te.HAVE_TE:
        raise ImportError("--transformer-impl transformer_engine needs Transformer Engine; use --transformer-impl local")
    return te.TEColumnParallelLinear, te.TERowParallelLinear


def build_decoder_spec(config: TransformerConfig, *, core_attention: type, gated_delta_net: type) -> TransformerBlockSubmodules:
    """The block spec of a dense or hybrid decoder: one layer spec per layer and the final norm.

    config: its `linear_attention_freq` gives the layer pattern (None: all full attention).
    core_attention: class of SelfAttention's core attention. gated_delta_net: class of the GDN layer.
    """
    if config.num_moe_experts is not None or config.multi_latent_attention:
        raise ValueError("--num-experts and --multi-latent-attention are not supported by this decoder block")
    if config.normalization != "RMSNorm":
        raise ValueError(f"--normalization {config.normalization} is not supported: use --normalization RMSNorm")
    hybrid = config.experimental_attention_variant == "gated_delta_net"
    pattern = get_linear_attention_pattern(config) if hybrid else [0] * config.num_layers
    column, row = pick_linears(config)
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=column,
            core_attention=core_attention,
            linear_proj=row,
            q_layernorm=RMSNorm if config.qk_layernorm else IdentityOp,
            k_layernorm=RMSNorm if config.qk_layernorm else IdentityOp,
        ),
    )
    delta_net = ModuleSpec(
        module=gated_delta_net,
        submodules=GatedDeltaNetSubmodules(in_proj=column, out_norm=GatedOutputNorm, out_proj=row),
    )
    mlp = get_mlp_module_spec_for_backend(backend=_LinearBackend(column, row), num_experts=None)
    layers = [
        ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=RMSNorm,
                self_attention=delta_net if is_linear else attention,
                self_attn_bda=get_bias_dropout_add,
                pre_mlp_layernorm=RMSNorm,
                mlp=mlp,
                mlp_bda=get_bias_dropout_add,
            ),
        )
        for is_linear in pattern
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


class _LinearBackend(LocalSpecProvider):
    """Megatron's local backend with the linears of `pick_linears`."""

    def __init__(self, column: type, row: type):
        self._column, self._row = column, row

    def column_parallel_linear(self) -> type:
        return self._column

    def row_parallel_linear(self) -> type:
        return self._row

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type[torch.nn.Module]:
        return RMSNorm
