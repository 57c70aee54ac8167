"""Write whole weights as a Hugging Face folder, in parallel: each rank the tensors that it owns, into files of its own.

    writers = choose_writers(sizes, candidates)              the same on every rank
    shards = ShardWriter(folder, rank=rank)                  on each rank: its tensors, hashed and written as they come
    for name, tensor in own: shards.add(name, tensor)
    reports = gather(shards.close())                         the caller's collective
    complete_folder(folder, reports, ...)                    on one rank: config, index, and last the manifest

A rank holds no more than one file's tensors besides its weights. The folder must be on a file system that all ranks and the
engine see: /dev/shm or a node's own disk for one node, a shared one for several.

Left out: collectives, and which tensors there are (`megatron.grpo.weight_sync`).
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from longstraw.durable_files import let_others_read, sync_path
from longstraw.receipts.collect import checksum_tensors
from longstraw.rollout.weight_folder import (
    INDEX, MANIFEST, FileEntry, FolderManifest, TensorEntry, hash_file, write_manifest,
)

DEFAULT_FILE_BYTES = 2 * 10**9


@dataclass
class ShardReport:
    """What a rank has written."""

    files: dict[str, FileEntry] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    bytes: int = 0
    """Of the tensors."""


def choose_writers(sizes: Sequence[int], candidates: Sequence[Sequence[int]]) -> list[int]:
    """Which rank writes each item, so that ranks write about as many bytes each; a function of its arguments alone.

    sizes: bytes. candidates: the ranks that hold each item, at least one.
    """
    filled: dict[int, int] = {}
    writers = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        writers[item] = min(candidates[item], key=lambda rank: (filled.get(rank, 0), rank))
        filled[writers[item]] = filled.get(writers[item], 0) + sizes[item]
    return writers


def open_folder(folder: Path) -> None:
    """An empty folder, without what another life of the run has left there."""
    if folder.exists():
        remove_folder(folder)
    folder.mkdir(parents=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder; killed at any moment, it leaves the folder whole or without a manifest."""
    (folder / MANIFEST).unlink(missing_ok=True)
    sync_path(folder)
    shutil.rmtree(folder)


class ShardWriter:
    """One rank's files of a folder that exists; see the module."""

    def __init__(self, folder: Path, *, rank: int, file_bytes: int = DEFAULT_FILE_BYTES):
        self.folder, self.rank, self.file_bytes = folder, rank, file_bytes
        self._report = ShardReport()
        self._held: dict[str, torch.Tensor] = {}
        self._size = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor, from any device; it is copied, so the caller's may change afterwards."""
        tensor = tensor.detach().to("cpu", copy=True).contiguous()
        if self._held and self._size + tensor.nbytes > self.file_bytes:
            self._flush()
        self._held[name] = tensor
        self._size += tensor.nbytes

    def close(self) -> ShardReport:
        """Write what is left; what was written."""
        self._flush()
        return self._report

    def _flush(self) -> None:
        if not self._held:
            return
        path = self.folder / f"model-{self.rank:05d}-{len(self._report.files):05d}.safetensors"
        save_file(self._held, path, metadata={"format": "pt"})
        let_others_read(path)
        sync_path(path)
        self._report.files[path.name] = hash_file(path)
        for name, tensor in self._held.items():
            self._report.tensors[name] = TensorEntry(path.name, checksum_tensors([(name, tensor)]))
            self._report.bytes += tensor.nbytes
        self._held, self._size = {}, 0


def complete_folder(
    folder: Path, reports: Sequence[ShardReport], manifest: FolderManifest, *, config: dict[str, Any],
    extra_files: Sequence[str] = (),
) -> FolderManifest:
    """Write config.json, the index and the manifest of a folder whose shards are all there; returns the manifest.

    manifest: of kind full, without files and tensors. extra_files: names of further files in the folder that belong to it.
    """
    files = {name: entry for report in reports for name, entry in report.files.items()}
    tensors = {name: entry for report in reports for name, entry in report.tensors.items()}
    index = {
        "metadata": {"total_size": sum(report.bytes for report in reports)},
        "weight_map": {name: tensors[name].file for name in sorted(tensors)},
    }
    for name, content in (("config.json", config), (INDEX, index)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    for name in ("config.json", INDEX, *extra_files):
        files[name] = hash_file(folder / name)
    manifest = replace(manifest, files=files, tensors=tensors)
    write_manifest(folder, manifest)
    return manifest
