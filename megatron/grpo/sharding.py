"""How each parameter lies over the tensor-parallel and expert-parallel ranks, by its name.

Column-parallel weights are cut along their first dimension, row-parallel ones along their second, norms are replicated.
Some column-parallel weights hold several sections (gate and up; q, k, v, z, beta, alpha), each of which is cut.

Of the low-rank pair of a weight [d, k], B [d, R] is cut as the weight where that is cut by rows, A [R, k] where by columns.

Experts are not cut: each expert-parallel rank has some of them whole, under names that count from 0 on every rank.
"""

import re

import torch
import torch.distributed as dist

from megatron.grpo.presets import ModelPreset

_ROW_PARALLEL = ("linear_proj.weight", "out_proj.weight", "linear_fc2.weight")


def section_sizes(name: str, shape: torch.Size, preset: ModelPreset) -> list[int] | None:
    """Sizes of the sections of a parameter's first dimension at TP 1, or None for one section.

    name: the parameter's full name in the model; shape: its shape at TP 1.
    """
    if name.endswith(("linear_fc1.weight", "linear_fc1.lora_b")):
        return [shape[0] // 2] * 2
    if name.endswith(("in_proj.weight", "in_proj.lora_b", "conv1d.weight")):
        qk = preset.linear_num_key_heads * preset.linear_key_head_dim
        v = preset.linear_num_value_heads * preset.linear_value_head_dim
        heads = preset.linear_num_value_heads
        return [qk, qk, v] if name.endswith("conv1d.weight") else [qk, qk, v, v, heads, heads]
    return None


def partition_dim(name: str) -> int | None:
    """The dimension along which a parameter is cut over TP, or None where it is replicated."""
    if "norm" in name:
        return None
    module, _, own = name.rpartition(".")
    by_columns = f"{module}.weight".endswith(_ROW_PARALLEL)
    if own in ("lora_a", "lora_b"):
        return (1 if own == "lora_a" else None) if by_columns else (0 if own == "lora_b" else None)
    return 1 if name.endswith(_ROW_PARALLEL) else 0


def shard_parameter(name: str, full: torch.Tensor, preset: ModelPreset, rank: int, size: int) -> torch.Tensor:
    """This TP rank's part of a parameter (or its gradient) that is whole in `full`."""
    dim = partition_dim(name)
    if size == 1 or dim is None:
        return full
    sections = section_sizes(name, full.shape, preset) if dim == 0 else None
    parts = full.split(sections, 0) if sections else [full]
    return torch.cat([part.chunk(size, dim)[rank] for part in parts], dim)


def unshard_parameter(name: str, shards: list[torch.Tensor], preset: ModelPreset) -> torch.Tensor:
    """The whole parameter from every TP rank's part, in rank order: the inverse of `shard_parameter`."""
    dim, size = partition_dim(name), len(shards)
    if size == 1 or dim is None:
        return shards[0]
    rows = shards[0].shape[0] * (size if dim == 0 else 1)
    sections = section_sizes(name, torch.Size([rows, *shards[0].shape[1:]]), preset) if dim == 0 else None
    if not sections:
        return torch.cat(shards, dim)
    local = [[s // size for s in sections]] * size
    parts = [shard.split(sizes, 0) for shard, sizes in zip(shards, local)]
    return torch.cat([part[i] for i in range(len(sections)) for part in parts], 0)


_EXPERT = re.compile(r"(.*\.experts\.(?:local_experts\.|linear_fc[12]\.weight))(\d+)(.*)")


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to one routed expert (shared experts are dense parameters)."""
    return _EXPERT.fullmatch(name) is not None


def whole_name(name: str, num_experts: int | None, rank: int, size: int) -> str:
    """The name that a parameter of an expert-parallel rank has in the model of one rank: its expert's number of all."""
    found = _EXPERT.fullmatch(name)
    if found is None or size == 1:
        return name
    before, number, after = found.groups()
    return f"{before}{int(number) + rank * (num_experts // size)}{after}"


def gather_experts(
    local: dict[str, torch.Tensor], preset: ModelPreset, ep: dist.ProcessGroup
) -> dict[str, torch.Tensor]:
    """Every expert's tensors (weights or gradients) under their whole names, and the other tensors as they are.

    local: of this rank, in the same order on all. Collective over `ep`.
    """
    size, whole = ep.size(), {}
    for name, tensor in local.items():
        if size == 1 or not is_expert(name):
            whole[name] = tensor
            continue
        parts = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(parts, tensor.contiguous(), group=ep)
        whole |= {whole_name(name, preset.num_experts, rank, size): part for rank, part in enumerate(parts)}
    return whole


def gather_gradients(model: torch.nn.Module, preset: ModelPreset, groups) -> dict[str, torch.Tensor]:
    """Every parameter's whole gradient, by its name in the model of one rank; zeros where a parameter is frozen.

    model: inside DDP, after `finalize_gradients`. groups: its ProcessGroupCollection. Collective over `tp` and `ep`.
    """
    whole = {}
    for name, parameter in model.named_parameters():
        own = parameter.main_grad if parameter.requires_grad else torch.zeros_like(parameter)
        shards = [torch.empty_like(own) for _ in range(groups.tp.size())]
        dist.all_gather(shards, own.contiguous(), group=groups.tp)
        whole[name] = unshard_parameter(name, shards, preset)
    return gather_experts(whole, preset, groups.ep)
