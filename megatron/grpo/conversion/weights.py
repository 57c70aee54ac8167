"""Move weights between a Hugging Face folder and a Megatron model, one tensor at a time.

The model's storage is the only whole copy: an imported tensor replaces a parameter's storage, an exported one is made
when its shard is written. Rows of padded vocabulary are zero on import and left out on export. No value is changed
unless a dtype is asked for. The experts' biases are buffers, in float32 on both sides whatever the dtype.

Left out: pipeline parallelism, every rank of a TP or EP group holding its part of all layers; and the grouped experts of
Transformer Engine, whose distributed checkpoints are those of the experts that conversion builds.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from megatron.grpo.conversion.architecture import hf_config_from_preset
from megatron.grpo.conversion.hf_reader import HFReader
from megatron.grpo.conversion.hf_writer import (
    copy_tokenizer,
    make_empty_folder,
    plan_shards,
    write_generation_config,
    write_json,
    write_shards,
)
from megatron.grpo.conversion.names import ParameterMap, map_parameters
from megatron.grpo.conversion.plan import ConversionReport, plan_import
from megatron.grpo.presets import ModelPreset
from megatron.grpo.sharding import shard_parameter, unshard_parameter

DEFAULT_SHARD_BYTES = 5 * 10**9


def import_weights(
    model: GPTModel, reader: HFReader, preset: ModelPreset, *, dtype: torch.dtype | None = None
) -> ConversionReport:
    """Fill a model with the weights of a Hugging Face folder: this rank's part of every parameter, on its device.

    model: of the preset, built at any TP and EP size and vocabulary padding. dtype: see `plan_import`.
    Raises ValueError as `plan_import` does, and where the model is not the preset's.
    """
    maps, report = plan_import(reader, preset, dtype=dtype)
    for entry, parameter in match_parameters(model, maps, preset):
        if not _holds(model, entry, preset):
            continue
        target = dtype if isinstance(parameter, torch.nn.Parameter) else parameter.dtype
        tensors = [reader.read(name) for name, _ in entry.sources]
        merged = entry.layout.merge([t if target is None else t.to(target) for t in tensors])
        fill_parameter(model, parameter, entry, merged, preset)
    return report


def fill_parameter(model, parameter, entry: ParameterMap, whole: torch.Tensor, preset: ModelPreset) -> None:
    """Give a parameter its part of `whole` (TP 1, vocabulary not padded), in the dtype of `whole`."""
    tp = model.pg_collection.tp
    if entry.over_vocabulary:
        padded = parameter.shape[0] * tp.size()
        whole = torch.cat([whole, whole.new_zeros(padded - whole.shape[0], *whole.shape[1:])])
    part = shard_parameter(entry.megatron, whole, preset, tp.rank(), tp.size())
    if part.shape != parameter.shape:
        raise ValueError(f"{entry.megatron} has shape {list(parameter.shape)} in the model and {list(part.shape)} here")
    # A copy of its own: a part is a view of the whole tensor, which it would keep alive.
    parameter.data = part.to(device=parameter.device, copy=True).contiguous()


def match_parameters(
    model: GPTModel, maps: list[ParameterMap], preset: ModelPreset, *, ignore: Callable[[str], bool] = lambda name: False
) -> Iterator[tuple[ParameterMap, torch.Tensor]]:
    """Every map with the model's parameter or buffer; of another EP rank's expert, with this rank's of the same shape.

    ignore: names in the model that no map need have. Raises ValueError where maps and model do not name the same parameters.
    """
    state = model.state_dict(keep_vars=True)
    tensors = {name: state[name] for name in state if not (name.endswith("_extra_state") or ignore(name))}
    names = [local_name(model, entry, preset) for entry in maps]
    differ = sorted(tensors.keys() ^ set(names))
    if differ:
        raise ValueError(f"the model and its preset differ in the parameters {', '.join(differ)}")
    return ((entry, tensors[name]) for entry, name in zip(maps, names))


def _experts_per_rank(model: GPTModel, preset: ModelPreset) -> int:
    return preset.num_experts // model.pg_collection.ep.size()


def local_name(model: GPTModel, entry: ParameterMap, preset: ModelPreset) -> str:
    """The name on every EP rank: experts are counted from 0 there."""
    if entry.expert is None:
        return entry.megatron
    return entry.name_for_expert(entry.expert % _experts_per_rank(model, preset))


def _holds(model: GPTModel, entry: ParameterMap, preset: ModelPreset) -> bool:
    """Whether this EP rank holds a parameter."""
    return entry.expert is None or entry.expert // _experts_per_rank(model, preset) == model.pg_collection.ep.rank()


def _share_expert(model: GPTModel, entry: ParameterMap, tensor: torch.Tensor, preset: ModelPreset) -> torch.Tensor:
    """An expert's tensor on every EP rank (collective). tensor: as `match_parameters` gives it."""
    shared = tensor.contiguous() if _holds(model, entry, preset) else torch.empty_like(tensor)
    dist.broadcast(shared, group_src=entry.expert // _experts_per_rank(model, preset), group=model.pg_collection.ep)
    return shared


@torch.no_grad()
def hf_tensors(model: GPTModel, preset: ModelPreset) -> Iterator[tuple[str, torch.Tensor]]:
    """(HF name, whole tensor) of every weight, in the order of the layers.

    Equal on every TP and EP rank (collective over both).
    """
    tp, ep = model.pg_collection.tp, model.pg_collection.ep
    for entry, parameter in match_parameters(model, map_parameters(preset), preset):
        shards = [parameter.detach()]
        if entry.expert is not None and ep.size() > 1:
            shards = [_share_expert(model, entry, shards[0], preset)]
        if tp.size() > 1:
            own = shards[0].contiguous()
            shards = [torch.empty_like(own) for _ in range(tp.size())]
            dist.all_gather(shards, own, group=tp)
        whole = unshard_parameter(entry.megatron, shards, preset)
        if entry.over_vocabulary:
            whole = whole[: preset.vocab_size]
        yield from zip((name for name, _ in entry.sources), (t.contiguous() for t in entry.layout.split(whole)))


def plan_export(model: GPTModel, preset: ModelPreset, max_shard_bytes: int) -> tuple[dict[str, str], int]:
    """(HF name -> file, bytes of all tensors) of an export."""
    sizes = {}
    for entry, parameter in match_parameters(model, map_parameters(preset), preset):
        for name, shape in entry.sources:
            sizes[name] = torch.Size(shape).numel() * parameter.element_size()
    return plan_shards(sizes, max_shard_bytes), sum(sizes.values())


def export_weights(
    model: GPTModel, preset: ModelPreset, folder: str | Path, *, tokenizer_folder: str | Path | None = None,
    source_config: dict[str, Any] | None = None, max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> list[str]:
    """Write a model as a Hugging Face folder that transformers loads; returns the names of the copied tokenizer files.

    Collective over the model's TP and EP groups; their first rank writes, to this machine. folder: empty or not there yet.
    tokenizer_folder: where tokenizer files and generation_config.json are copied from. source_config: see
    `hf_config_from_preset`. Raises ValueError where the folder is not empty or no HF family has the architecture.
    """
    writes = model.pg_collection.tp.rank() == 0 and model.pg_collection.ep.rank() == 0
    dtype = most_common_dtype(model)
    config = hf_config_from_preset(preset, dtype=str(dtype).removeprefix("torch."), source=source_config)
    files, total = plan_export(model, preset, max_shard_bytes)
    if not writes:
        for _ in hf_tensors(model, preset):
            pass
        return []
    folder = make_empty_folder(folder)
    tensors = ((name, tensor.cpu()) for name, tensor in hf_tensors(model, preset))
    write_shards(folder, tensors, files, total)
    copied = copy_tokenizer(tokenizer_folder, folder) if tokenizer_folder else []
    write_generation_config(folder, config)
    write_json(folder / "config.json", config)
    return copied


def most_common_dtype(model: torch.nn.Module) -> torch.dtype:
    """The dtype of most of a model's elements."""
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return max(counts, key=counts.__getitem__)
