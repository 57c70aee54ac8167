"""Build models from presets: the stateful model that the sweeps drive, or the conventional one of the same modules.

Both have the same parameter names and shapes, so weights move between them by name.
"""

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from longstraw.adapters.expert_routing import ReplayMoELayer
from longstraw.adapters.full_attention import PagedCoreAttention
from longstraw.adapters.gated_delta_net import StatefulGatedDeltaNet
from longstraw.adapters.latent_attention import PagedSparseAttention
from longstraw.patches.device import cuda_means_cpu, install_cpu_device_layer
from longstraw.patches.layer_specs import build_decoder_spec
from longstraw.patches.stable_selection import install_stable_selection
from megatron.grpo.presets import ModelPreset, check_divisible


class FlashCoreAttention(MegatronModule):
    """Core attention of a conventional model by torch's fused kernel: causal, whole sequence, no context parallelism.

    Megatron's DotProductAttention materialises [S, S] scores, which no one would train long sequences with.
    """

    def __init__(self, config, layer_number, attn_mask_type=None, attention_type=None, softmax_scale=None, **_):
        super().__init__(config=config)
        self.softmax_scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(self, query, key, value, attention_mask=None, **_):
        """query [s, b, H, D], key and value [s, b, G, D] -> [s, b, H * D]."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=True)
        return o.permute(2, 0, 1, 3).flatten(2)


def pad_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel_size: int) -> int:
    """The vocabulary padded to a multiple of divisible_by x TP, as Megatron pads it."""
    unit = divisible_by * tensor_parallel_size
    return -(-vocab_size // unit) * unit


def build_model(
    preset: ModelPreset, config: TransformerConfig, groups: ProcessGroupCollection, *,
    core_attention: type = PagedCoreAttention, gated_delta_net: type = StatefulGatedDeltaNet,
    sparse_attention: type = PagedSparseAttention, moe_layer: type = ReplayMoELayer, padded_vocab_size: int | None = None,
) -> GPTModel:
    """The model of a preset, by default the stateful one, on the current device.

    core_attention, gated_delta_net, sparse_attention and moe_layer pick other classes: `DotProductAttention` or
    `FlashCoreAttention` with Megatron's `GatedDeltaNet`, `DSAttention` and `MoELayer` give the conventional model.
    padded_vocab_size: see `pad_vocab_size` (default: no padding).
    Raises ValueError where the parallel sizes do not divide what they have to.
    """
    check_divisible(preset, config)
    install_cpu_device_layer()
    if preset.sparse:
        install_stable_selection()
    with cuda_means_cpu():
        model = GPTModel(
            config,
            build_decoder_spec(
                config, core_attention=core_attention, gated_delta_net=gated_delta_net,
                sparse_attention=sparse_attention, moe_layer=moe_layer,
            ),
            vocab_size=padded_vocab_size or preset.vocab_size,
            max_sequence_length=preset.max_position_embeddings,
            share_embeddings_and_output_weights=preset.tied_embeddings,
            position_embedding_type="rope",
            rotary_percent=preset.rotary_percent,
            rotary_base=preset.rotary_base,
            pg_collection=groups,
        )
    if preset.latent_norm_epsilon is not None:
        set_latent_norm_epsilon(model, preset.latent_norm_epsilon)
    return model


def set_latent_norm_epsilon(model: GPTModel, epsilon: float) -> None:
    """Set the epsilon of the norms on the query and key/value latents, which Megatron builds with the layer norms'."""
    for layer in model.decoder.layers:
        layer.self_attention.q_layernorm.eps = layer.self_attention.kv_layernorm.eps = epsilon


def build_conventional_model(preset, config, groups, *, flash: bool, padded_vocab_size: int | None = None) -> GPTModel:
    """The same model of Megatron's own classes: whole sequences under ordinary autograd (context parallel 1).

    flash: full attention by `FlashCoreAttention`. Sparse attention is always Megatron's unfused DSAttention.
    """
    attention = FlashCoreAttention if flash else DotProductAttention
    return build_model(
        preset, config, groups, core_attention=attention, gated_delta_net=GatedDeltaNet, sparse_attention=DSAttention,
        moe_layer=MoELayer, padded_vocab_size=padded_vocab_size,
    )


def synchronize_parameters(
    model: torch.nn.Module, group: torch.distributed.ProcessGroup,
    expert_group: torch.distributed.ProcessGroup | None = None,
) -> None:
    """Broadcast every parameter from its group's first rank (context-parallel ranks hold the same weights).

    expert_group: the ranks that hold the same experts, where expert parallelism gives others to the rest of `group`.
    Raises ValueError where it is needed and missing: every rank would get the first one's experts.
    """
    for name, parameter in model.named_parameters():
        own_experts = not getattr(parameter, "allreduce", True)
        if own_experts and expert_group is None:
            raise ValueError(f"{name} differs between expert-parallel ranks: synchronize it over an expert group")
        torch.distributed.broadcast(parameter.data, group_src=0, group=expert_group if own_experts else group)
