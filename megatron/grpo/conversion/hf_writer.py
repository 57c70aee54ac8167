"""Write a Hugging Face folder: safetensors shards with their index, config.json, and the tokenizer's files.

Shards are planned from the shapes before the first tensor is made, so no more than one shard is held at a time.
config.json is written last: a folder that a killed export leaves behind does not load.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron.grpo.conversion.hf_reader import INDEX

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
"""Files beside the weights that a model needs to be used, copied as they are."""

_TEMPLATE_FOLDER = "additional_chat_templates"


def plan_shards(sizes: dict[str, int], max_shard_bytes: int) -> dict[str, str]:
    """Tensor name -> file, in the order of `sizes` (bytes): a file takes tensors until the next would exceed the limit.

    A tensor larger than the limit has a file of its own.
    """
    shards, filled = [[]], 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) == 1:
        return dict.fromkeys(shards[0], "model.safetensors")
    return {
        name: f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number, names in enumerate(shards, start=1)
        for name in names
    }


def write_shards(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], files: dict[str, str], total: int) -> None:
    """Write tensors, which come in the order of `files` (name -> file), and the index where there are several files.

    total: bytes of all tensors, for the index.
    """
    for file, shard in _group_by_file(tensors, files):
        save_file(shard, folder / file, metadata={"format": "pt"})
    if len(set(files.values())) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": files}
        write_json(folder / INDEX, index)


def _group_by_file(tensors, files: dict[str, str]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    current, shard = None, {}
    for name, tensor in tensors:
        if shard and files[name] != current:
            yield current, shard
            shard = {}
        current = files[name]
        shard[name] = tensor
    if shard:
        yield current, shard


def copy_tokenizer(source: str | Path, folder: str | Path) -> list[str]:
    """Copy the tokenizer's files, its chat templates and generation_config.json; returns the names of those there were."""
    source, folder = Path(source), Path(folder)
    copied = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    for name in copied:
        shutil.copyfile(source / name, folder / name)
    if (source / _TEMPLATE_FOLDER).is_dir():
        shutil.copytree(source / _TEMPLATE_FOLDER, folder / _TEMPLATE_FOLDER)
        copied.append(f"{_TEMPLATE_FOLDER}/")
    return copied


def write_generation_config(folder: Path, config: dict[str, Any]) -> None:
    """A generation_config.json with the token ids of config.json, where none was copied."""
    path = folder / "generation_config.json"
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None}
    if not path.exists():
        write_json(path, ids)


def write_json(path: Path, content: Any) -> None:
    """Write JSON with a final newline."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def make_empty_folder(folder: str | Path, flag: str = "--save") -> Path:
    """The folder, made if need be. Raises ValueError where something is in it: nothing is overwritten."""
    path = require_empty_folder(folder, flag)
    path.mkdir(parents=True, exist_ok=True)
    return path


def require_empty_folder(folder: str | Path, flag: str = "--save") -> Path:
    """The folder, empty or not there yet. Raises ValueError, naming the flag, where something is in it."""
    path = Path(folder)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{flag} {path} exists and is not an empty folder; nothing is overwritten")
    return path
