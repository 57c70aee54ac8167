"""What an import will do, known before a model exists: the maps of a checkpoint's tensors and its report.

Nothing here needs Megatron, so that a checkpoint is checked, or refused, at once.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from megatron.grpo.conversion.accounting import (
    TIED_COPY,
    account_for_tensors,
    check_merged_dtypes,
    find_prefix,
    summarize_left_out,
)
from megatron.grpo.conversion.architecture import count_next_token_layers
from megatron.grpo.conversion.hf_reader import HFReader, list_names
from megatron.grpo.conversion.names import ParameterMap, map_parameters
from megatron.grpo.presets import ModelPreset, check_divisible


@dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """What a conversion did: counts, and the names that it left out on purpose by reason."""

    tensors: int
    elements: int
    left_out: dict[str, dict]
    dtypes: dict[str, int]


def plan_import(
    reader: HFReader, preset: ModelPreset, *, dtype: torch.dtype | None = None
) -> tuple[list[ParameterMap], ConversionReport]:
    """The maps of a checkpoint's tensors and its report, without reading a tensor (but a tied copy of the embeddings).

    dtype: of every parameter; None keeps each tensor's own.
    Raises ValueError that names every unmapped, missing or wrongly shaped tensor, and merges of different dtypes.
    """
    maps = map_parameters(preset, prefix=find_prefix(reader.headers))
    left_out = account_for_tensors(
        reader.headers, maps, preset, next_token_layers=count_next_token_layers(reader.config)
    )
    for name in (name for name, reason in left_out.items() if reason == TIED_COPY):
        embeddings = maps[0].sources[0][0]
        if not torch.equal(reader.read(name), reader.read(embeddings)):
            raise ValueError(f"config.json ties the embeddings, but {name} differs from {embeddings}")
    if dtype is None:
        check_merged_dtypes(reader.headers, maps)
    return maps, _report(reader, maps, left_out)


def check_parallel_sizes(preset: ModelPreset, *, tensor: int, expert: int = 1) -> None:
    """Raise ValueError, naming the flag, where a parallel size does not divide what it has to."""
    counts = {
        "query heads": preset.num_attention_heads,
        "key/value heads": preset.num_query_groups,
        "gated delta net key heads": preset.linear_num_key_heads or 0,
        "feed-forward channels": preset.ffn_hidden_size,
    }
    for what, count in counts.items():
        if count % tensor:
            raise ValueError(f"--tensor-model-parallel-size {tensor} does not divide the {count} {what} of {preset.name}")
    sizes = dict(tensor_model_parallel_size=tensor, context_parallel_size=1, expert_model_parallel_size=expert)
    check_divisible(preset, SimpleNamespace(**sizes))


def verify_layouts(reader: HFReader, maps: list[ParameterMap], *, dtype: torch.dtype | None = None) -> None:
    """Read every tensor, make each Megatron parameter, take it apart again and compare every bit with the source.

    dtype: what the tensors are cast to first, as in `plan_import`.
    Raises ValueError that names the tensors that do not survive, RuntimeError (safetensors') for an unreadable file.
    """
    broken = []
    for entry in maps:
        tensors = [reader.read(name) for name, _ in entry.sources]
        tensors = [tensor if dtype is None else tensor.to(dtype) for tensor in tensors]
        again = entry.layout.split(entry.layout.merge(tensors))
        broken += [
            name
            for (name, shape), a, b in zip(entry.sources, tensors, again, strict=True)
            if b.shape != shape or not torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        ]
    if broken:
        raise ValueError(f"the layout changes {list_names(broken)}")


def _report(reader: HFReader, maps: list[ParameterMap], left_out: dict[str, str]) -> ConversionReport:
    headers = [reader.headers[name] for entry in maps for name, _ in entry.sources]
    dtypes = [header.dtype for header in headers]
    return ConversionReport(
        tensors=len(headers),
        elements=sum(torch.Size(header.shape).numel() for header in headers),
        left_out=summarize_left_out(left_out),
        dtypes={dtype: dtypes.count(dtype) for dtype in sorted(set(dtypes))},
    )
