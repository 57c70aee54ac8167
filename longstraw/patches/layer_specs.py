"""The decoder block of every supported model, from Megatron's own modules.

Megatron builds a hybrid block (gated delta net + full attention) only on Transformer Engine. This builds the same block
for any backend, with one naming of parameters: norms are modules of their own (`input_layernorm.weight`), never fused
into the following linear. What is swapped is stated by the arguments of `build_decoder_spec`: the core attention, the
gated delta net, the sparse attention of latent attention, and the layer of experts; Megatron's own classes give the
conventional model, ours the stateful one.

Left out: latent attention without a sparse selection.
"""

from functools import partial

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_linear_attention_pattern,
    get_moe_layer_pattern,
)
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import (
    AbsorbedMLASelfAttention,
    AbsorbedMLASelfAttentionSubmodules,
)
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexer,
    DSAIndexerSubmodules,
    DSAttention,
    DSAttentionSubmodules,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from longstraw.patches.linears import Linears, pick_linears
from longstraw.patches.norms import GatedOutputNorm, RMSNorm


def build_decoder_spec(
    config: TransformerConfig, *, core_attention: type, gated_delta_net: type, sparse_attention: type = DSAttention,
    moe_layer: type = MoELayer,
) -> TransformerBlockSubmodules:
    """The block spec of a decoder: one layer spec per layer and the final norm.

    config: its `experimental_attention_variant` and `linear_attention_freq` give the attention of each layer, its
    `num_moe_experts` and `moe_layer_freq` the layers with experts.
    core_attention: class of SelfAttention's core attention. gated_delta_net: class of the GDN layer. sparse_attention:
    class of the core attention of latent attention, built as DSAttention is. moe_layer: class of the layers with experts.
    Raises ValueError, naming the flags, for what this block cannot be.
    """
    if config.normalization != "RMSNorm":
        raise ValueError(f"--normalization {config.normalization} is not supported: use --normalization RMSNorm")
    if config.multi_latent_attention and config.experimental_attention_variant != "dsa":
        raise ValueError("--multi-latent-attention needs --experimental-attention-variant dsa")
    linears = pick_linears(config)
    attention = _attention_of_layers(config, linears, core_attention, gated_delta_net, sparse_attention)
    mlp = _mlp_of_layers(config, linears, moe_layer)
    layers = [
        ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=RMSNorm,
                self_attention=attention[layer],
                self_attn_bda=get_bias_dropout_add,
                pre_mlp_layernorm=RMSNorm,
                mlp=mlp[layer],
                mlp_bda=get_bias_dropout_add,
            ),
        )
        for layer in range(config.num_layers)
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _attention_of_layers(
    config: TransformerConfig, linears: Linears, core_attention: type, gated_delta_net: type, sparse_attention: type
) -> list[ModuleSpec]:
    """The attention of each layer."""
    if config.experimental_attention_variant == "dsa":
        return [_latent_attention(config, linears, sparse_attention)] * config.num_layers
    full = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=linears.column,
            core_attention=core_attention,
            linear_proj=linears.row,
            q_layernorm=RMSNorm if config.qk_layernorm else IdentityOp,
            k_layernorm=RMSNorm if config.qk_layernorm else IdentityOp,
        ),
    )
    if config.experimental_attention_variant != "gated_delta_net":
        return [full] * config.num_layers
    delta_net = ModuleSpec(
        module=gated_delta_net,
        submodules=GatedDeltaNetSubmodules(
            in_proj=linears.column, out_norm=GatedOutputNorm, out_proj=linears.row
        ),
    )
    return [delta_net if is_linear else full for is_linear in get_linear_attention_pattern(config)]


def _latent_attention(config: TransformerConfig, linears: Linears, sparse_attention: type) -> ModuleSpec:
    """Absorbed latent attention over the positions that an indexer selects; the norms on the latents stand alone."""
    indexer = ModuleSpec(
        module=DSAIndexer,
        submodules=DSAIndexerSubmodules(
            linear_wq_b=linears.replicated,
            linear_wk=linears.replicated,
            k_norm=WrappedTorchNorm,
            linear_weights_proj=linears.replicated,
        ),
    )
    return ModuleSpec(
        module=AbsorbedMLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=AbsorbedMLASelfAttentionSubmodules(
            # AbsorbedMLASelfAttention knows few classes for the down projections; these it gathers itself.
            linear_q_down_proj=linears.column,
            linear_q_up_proj=linears.column,
            linear_kv_down_proj=linears.column,
            linear_kv_up_proj=linears.column,
            core_attention=ModuleSpec(module=sparse_attention, submodules=DSAttentionSubmodules(indexer=indexer)),
            linear_proj=linears.row,
            q_layernorm=RMSNorm if config.qk_layernorm else IdentityOp,
            kv_layernorm=RMSNorm if config.qk_layernorm else IdentityOp,
        ),
    )


def _mlp_of_layers(config: TransformerConfig, linears: Linears, moe_layer: type) -> list:
    """The MLP of each layer: dense, or experts."""
    backend = _LinearBackend(config, linears)
    dense = get_mlp_module_spec_for_backend(backend=backend, num_experts=None)
    if config.num_moe_experts is None:
        return [dense] * config.num_layers
    spec = get_moe_module_spec_for_backend(
        backend=backend, num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
    )
    experts = partial(moe_layer, submodules=spec.keywords["submodules"])
    return [experts if has_experts else dense for has_experts in get_moe_layer_pattern(config)]


class _LinearBackend(LocalSpecProvider):
    """Megatron's local backend with the linears of `pick_linears`."""

    def __init__(self, config: TransformerConfig, linears: Linears):
        self._config, self._linears = config, linears

    def column_parallel_linear(self) -> type:
        return self._linears.column

    def row_parallel_linear(self) -> type:
        return self._linears.row

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type[torch.nn.Module]:
        return RMSNorm

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool):
        if self._config.transformer_impl == "transformer_engine":
            from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

            return TESpecProvider().grouped_mlp_modules(moe_use_grouped_gemm)
        if moe_use_grouped_gemm:
            raise ValueError("--moe-grouped-gemm needs --transformer-impl transformer_engine")
        return super().grouped_mlp_modules(moe_use_grouped_gemm)
