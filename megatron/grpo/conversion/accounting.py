"""Hold every tensor of a Hugging Face checkpoint to account before one is read.

A checkpoint is taken only if every tensor that the model needs is there in the right shape, and every other one is left
out on purpose, by name and with a reason.
"""

import re
from collections.abc import Iterable

from megatron.grpo.conversion.hf_reader import DTYPES, TensorHeader, list_names
from megatron.grpo.conversion.names import MULTIMODAL_PREFIX, TEXT_PREFIX, ParameterMap
from megatron.grpo.presets import ModelPreset

TIED_COPY = "a copy of the tied embeddings"

_NEXT_TOKEN = "next-token-prediction layers"

_LEFT_OUT = (
    (re.compile(r"(model\.)?visual\."), "vision tower", True),
    (re.compile(r"mtp\."), _NEXT_TOKEN, True),
    (re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq$"), "a buffer that follows from config.json", False),
)
"""(name, reason, only in Qwen3.5 checkpoints)."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def find_prefix(names: Iterable[str]) -> str:
    """The prefix of the decoder's names in a checkpoint."""
    return MULTIMODAL_PREFIX if any(name.startswith(MULTIMODAL_PREFIX) for name in names) else TEXT_PREFIX


def account_for_tensors(
    headers: dict[str, TensorHeader], maps: list[ParameterMap], preset: ModelPreset, *, next_token_layers: int = 0
) -> dict[str, str]:
    """The names that are left out on purpose -> the reason.

    next_token_layers: how many layers after the decoder's predict tokens further ahead (GLM and DeepSeek).
    Raises ValueError that lists every unmapped, missing, wrongly shaped or unreadable tensor.
    """
    needed = {name: shape for entry in maps for name, shape in entry.sources}
    left_out, unmapped = {}, []
    for name in sorted(headers.keys() - needed.keys()):
        reason = _reason_to_leave_out(name, preset, next_token_layers)
        if reason is None:
            unmapped.append(name)
        else:
            left_out[name] = reason
    missing = sorted(needed.keys() - headers.keys())
    present = [(name, shape, headers[name]) for name, shape in needed.items() if name in headers]
    shapes = [f"{name} {list(h.shape)} instead of {list(shape)}" for name, shape, h in present if h.shape != shape]
    dtypes = [f"{name} ({h.dtype})" for name, _, h in present if h.dtype not in DTYPES]
    problems = (("unmapped", unmapped), ("missing", missing), ("of another shape", shapes), ("not floating point", dtypes))
    found = [f"{len(names)} {what}: {list_names(names)}" for what, names in problems if names]
    if any(name.endswith(".mlp.experts.gate_up_proj") for name in unmapped):
        found.append("its experts are fused, where transformers' save_pretrained writes them one by one")
    if found:
        raise ValueError(f"the checkpoint is not the model of its config.json: {'; '.join(found)}")
    return left_out


def _reason_to_leave_out(name: str, preset: ModelPreset, next_token_layers: int) -> str | None:
    layer = _LAYER.match(name)
    if layer and preset.num_layers <= int(layer[1]) < preset.num_layers + next_token_layers:
        return _NEXT_TOKEN
    if preset.tied_embeddings and name == "lm_head.weight":
        return TIED_COPY
    for pattern, reason, only_hybrid in _LEFT_OUT:
        if pattern.match(name) and (preset.hybrid or not only_hybrid):
            return reason
    return None


def check_merged_dtypes(headers: dict[str, TensorHeader], maps: list[ParameterMap]) -> None:
    """Raise ValueError where no dtype would keep the bits of HF tensors that make one Megatron tensor.

    A parameter is one tensor; so are the experts of a layer, in a checkpoint.
    """
    dtypes: dict[str, set[str]] = {}
    for entry in maps:
        together = entry.megatron if entry.expert is None else entry.name_for_expert("*")
        dtypes.setdefault(together, set()).update(headers[name].dtype for name, _ in entry.sources)
    mixed = [together for together, found in dtypes.items() if len(found) > 1]
    if mixed:
        raise ValueError(f"tensors of different dtypes make up {list_names(mixed)}; choose one with --dtype")


def summarize_left_out(left_out: dict[str, str]) -> dict[str, dict]:
    """reason -> how many tensors, and their names."""
    names: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        names.setdefault(reason, []).append(name)
    return {reason: {"tensors": len(found), "names": found} for reason, found in names.items()}
