"""Which adapter serves which module.

A new layer kind registers here: its stateful module class and its adapter class.
"""

import torch
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttention
from megatron.core.transformer.moe.moe_layer import MoELayer

from longstraw.adapters.base import LayerAdapter
from longstraw.adapters.expert_routing import ExpertRoutingAdapter, ReplayMoELayer
from longstraw.adapters.full_attention import FullAttentionAdapter, PagedCoreAttention
from longstraw.adapters.gated_delta_net import GatedDeltaNetAdapter, StatefulGatedDeltaNet
from longstraw.adapters.latent_attention import LatentAttentionAdapter

ADAPTERS: dict[type[torch.nn.Module], type] = {
    PagedCoreAttention: FullAttentionAdapter,
    StatefulGatedDeltaNet: GatedDeltaNetAdapter,
    AbsorbedMLASelfAttention: LatentAttentionAdapter,
}


def find_adapters(model: torch.nn.Module, num_layers: int) -> list[LayerAdapter]:
    """One adapter a layer, in layer order. Raises ValueError where a layer has no stateful module, or more than one."""
    found = [ADAPTERS[type(module)](module) for module in model.modules() if type(module) in ADAPTERS]
    found.sort(key=lambda adapter: adapter.layer_number)
    numbers = [adapter.layer_number for adapter in found]
    if numbers != list(range(1, num_layers + 1)):
        raise ValueError(
            f"the model has {num_layers} layers, but stateful modules stand in layers {numbers}: "
            "build it with the layer specs of longstraw.patches.layer_specs and --pipeline-model-parallel-size 1"
        )
    return found


def find_routers(model: torch.nn.Module) -> list[LayerAdapter]:
    """One adapter for each layer with experts, in layer order.

    Raises ValueError where experts are routed by another class, whose choices would not be repeated.
    """
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    other = [layer.layer_number for layer in layers if type(layer) is not ReplayMoELayer]
    if other:
        raise ValueError(
            f"the experts of layers {other} have no router that records its choices: build the model with the layer "
            "specs of longstraw.patches.layer_specs"
        )
    return sorted(map(ExpertRoutingAdapter, layers), key=lambda adapter: adapter.layer_number)
