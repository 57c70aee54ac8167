"""The low-rank pairs of a model as an adapter in PEFT's format, which inference engines load.

A pair of a weight that Megatron has fused (q, k and v; gate and up) becomes one of each of its parts: they share A, and
their rows of B are taken apart as the weight's are.

Left out: pairs of experts, gated delta nets and latent attention, which engines have no names for.
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from safetensors.torch import save_file

from longstraw.durable_files import let_others_read, sync_path
from longstraw.patches.lora import find_pairs
from megatron.grpo.conversion.names import map_parameters
from megatron.grpo.presets import ModelPreset
from megatron.grpo.sharding import unshard_parameter

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


@torch.no_grad()
def gather_adapter(model: torch.nn.Module, preset: ModelPreset, groups: ProcessGroupCollection) -> dict[str, torch.Tensor]:
    """The adapter's tensors by PEFT's names, on the CPU. Collective over tensor parallelism; equal on its every rank."""
    maps = {entry.megatron: entry for entry in map_parameters(preset)}
    tensors = {}
    for pair in find_pairs(model):
        name = pair.matrix.name.removesuffix(".weight")
        a, b = (_gather(f"{name}.{own}", tensor.detach(), preset, groups.tp) for own, tensor in
                (("lora_a", pair.a), ("lora_b", pair.b)))
        entry = maps[pair.matrix.name]
        for (source, _), rows in zip(entry.sources, entry.layout.split(b), strict=True):
            prefix = f"base_model.model.{source.removesuffix('.weight')}"
            tensors[f"{prefix}.lora_A.weight"] = a.cpu().clone()
            tensors[f"{prefix}.lora_B.weight"] = rows.cpu().contiguous().clone()
    return tensors


def write_adapter(folder: Path, tensors: dict[str, torch.Tensor], *, rank: int, alpha: float) -> None:
    """Write PEFT's two files."""
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True, "base_model_name_or_path": None, "r": rank,
        "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "use_rslora": False,
        "target_modules": sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors}),
    }
    settings, weights = (folder / name for name in ADAPTER_FILES)
    settings.write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, weights, metadata={"format": "pt"})
    let_others_read(weights)
    for path in (settings, weights):
        sync_path(path)


def _gather(name: str, own: torch.Tensor, preset: ModelPreset, tp: dist.ProcessGroup) -> torch.Tensor:
    if tp.size() == 1:
        return own
    shards = [torch.empty_like(own) for _ in range(tp.size())]
    dist.all_gather(shards, own.contiguous(), group=tp)
    return unshard_parameter(name, shards, preset)
