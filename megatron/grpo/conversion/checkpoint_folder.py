"""The folder of a converted checkpoint: which model it is of, what stands beside its weights, which iteration is read.

    DIR/longstraw_model.json                  the preset
    DIR/release/                              weights (torch_dist): any TP size reads them
    DIR/huggingface/                          config.json and tokenizer of the HF folder it was converted from, if any
    DIR/latest_checkpointed_iteration.txt     written last: without it DIR is not a checkpoint

A training run's folder has iter_0000010/ and the like instead of release/ (see `megatron.grpo.checkpoint_folders`).

Left out: what is in an iteration's folder (see `megatron_checkpoint`). Nothing here needs Megatron.
"""

import shutil
from dataclasses import asdict
from pathlib import Path

from megatron.grpo.checkpoint_folders import TRACKER, find_checkpoint
from megatron.grpo.conversion.hf_writer import copy_tokenizer, write_json
from megatron.grpo.presets import PRESET_FILE, ModelPreset

HF_FOLDER = "huggingface"


def find_iteration(folder: str | Path, step: int | None = None) -> Path:
    """The folder of a checkpoint's latest iteration, or of `step`'s. Raises ValueError where it is not there."""
    found = find_checkpoint(folder, step)
    if found is None:
        raise ValueError(f"--load {folder} is not a Megatron checkpoint: it has no {TRACKER}")
    path, _ = found
    if not (path / ".metadata").is_file():
        raise ValueError(f"{path} is not a distributed checkpoint (torch_dist), the one format that is read")
    return path


def keep_hf_files(folder: str | Path, hf_folder: str | Path) -> list[str]:
    """Keep config.json and the tokenizer's files beside a checkpoint, for training and export; returns their names."""
    kept = Path(folder) / HF_FOLDER
    kept.mkdir(parents=True)
    shutil.copyfile(Path(hf_folder) / "config.json", kept / "config.json")
    return ["config.json", *copy_tokenizer(hf_folder, kept)]


def write_preset(folder: str | Path, preset: ModelPreset) -> None:
    """Write the architecture beside a checkpoint."""
    write_json(Path(folder) / PRESET_FILE, asdict(preset))
