"""The oracle of low-rank pairs: dense gradients of the merged weights, and the chain rule from them to A and B.

With W' = W + scale B A and G the dense gradient by W': dA = scale B^T G and dB = scale G A^T. Nothing of the product
under test is used.
"""

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from longstraw.patches.lora import LowRankPair, find_pairs
from megatron.grpo.sharding import shard_parameter, whole_name
from tests.support.models import ModelPair


def own_names(pair: LowRankPair, num_experts, ep) -> tuple[str, str]:
    """Names of a pair's A and B in the model of one rank."""
    linear = whole_name(pair.matrix.name, num_experts, ep.rank(), ep.size()).removesuffix("weight")
    return f"{linear}lora_a", f"{linear}lora_b"


@torch.no_grad()
def draw_pairs(models: ModelPair, groups: ProcessGroupCollection, names: list[str]) -> dict[str, torch.Tensor]:
    """Give the stateful model random pairs and merge them into the conventional one; the whole A and B by name.

    names: of all A and B in the model of one rank.
    """
    whole, plain, pairs = {}, dict(models.plain.named_parameters()), find_pairs(models.model)
    rank, scale = pairs[0].a.shape[0], pairs[0].scale
    generator = torch.Generator().manual_seed(3)
    for name in names:
        linear, _, own = name.rpartition(".")
        rows, columns = plain[f"{linear}.weight"].shape
        shape = (rank, columns) if own == "lora_a" else (rows, rank)
        whole[name] = torch.randn(shape, generator=generator, dtype=torch.float64) * shape[1] ** -0.5
    for name in names:
        if name.endswith("lora_a"):
            linear = name.removesuffix("lora_a")
            plain[f"{linear}weight"] += scale * whole[f"{linear}lora_b"] @ whole[name]
    for pair in pairs:
        for name, parameter in zip(own_names(pair, models.preset.num_experts, groups.ep), (pair.a, pair.b)):
            part = shard_parameter(name, whole[name], models.preset, groups.tp.rank(), groups.tp.size())
            parameter.copy_(part)
    return whole


def chain_rule(
    dense: dict[str, torch.Tensor], whole: dict[str, torch.Tensor], scale: float
) -> dict[str, torch.Tensor]:
    """What the gradients of all parameters must be: of the pairs by the chain rule, zeros of what is frozen."""
    found = {name: torch.zeros_like(gradient) for name, gradient in dense.items()}
    for name, a in whole.items():
        if name.endswith("lora_a"):
            linear = name.removesuffix("lora_a")
            gradient, b = dense[f"{linear}weight"], whole[f"{linear}lora_b"]
            found[name], found[f"{linear}lora_b"] = scale * b.T @ gradient, scale * gradient @ a.T
    return found
