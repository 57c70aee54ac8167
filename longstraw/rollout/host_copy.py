"""The weights that an engine follows the trainer with: on the host, at the trainer's precision.

An engine computes in bfloat16, or has repacked its weights, and in neither form can an update be made with the trainer's
bits. So the matrices that updates move lie here in float32, in the trainer's layout; after each update the engine gets
what it computes with: rounded as the trainer rounds, taken apart into the checkpoint's tensors, in files that exist in
memory alone and vanish with this process.

    copy = HostCopy.open("weights/version-0", read_map("weights/version-1/weight_map.json"), dtype="bfloat16")
    copy.apply("weights/version-1")
    with copy.serve() as sources:                # [(path, names or None for all)]: what the engine loads
        ...

One copy serves all ranks of a host. Left out: a copy that is itself cut over hosts; models whose float32 matrices exceed
one host's memory take full syncs.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save

from longstraw.receipts.collect import checksum_tensors
from longstraw.rollout.weight_delta import apply_delta, round_as_trainer
from longstraw.rollout.weight_folder import DELTA_FILE, read_manifest, tensor_files
from longstraw.rollout.weight_map import MappedWeight

Sources = list[tuple[str, list[str] | None]]
"""(safetensors file, the names to take from it; None for all)."""

_FILE_BYTES = 1 << 30


class HostCopy:
    """See the module. matrices: float32 [d, k] by the trainer's name. others: checkpoint name -> file, of all other tensors."""

    def __init__(
        self, matrices: dict[str, torch.Tensor], others: dict[str, Path], weights: Sequence[MappedWeight], dtype: torch.dtype
    ):
        self.matrices, self.others, self.weights, self.dtype = matrices, others, weights, dtype
        self.checksums: dict[str, str] = {}
        """Of the tensors that `serve` last made, by their names in the checkpoint."""

    @classmethod
    def open(cls, folder: str | Path, weights: Sequence[MappedWeight], dtype: str) -> "HostCopy":
        """Read the matrices of a Hugging Face folder. dtype: that the engine computes in, float32 or bfloat16.

        Raises ValueError where the folder lacks a tensor of the map, or has one of another shape or a narrower dtype.
        """
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"updates are for engines that compute in float32 or bfloat16, not {dtype}.")
        files = tensor_files(folder)
        matrices = {weight.name: _read_matrix(weight, files, folder) for weight in weights}
        moved = {name for weight in weights for name, _ in weight.sources}
        return cls(matrices, {n: file for n, file in files.items() if n not in moved}, weights, getattr(torch, dtype))

    def apply(self, folder: str | Path) -> None:
        """Make an update, and take the whole tensors that come with it.

        Raises ValueError as `apply_delta` does; the copy is as before, unless the message says that the update was applied.
        """
        folder = Path(folder)
        whole = {name: folder / entry.file for name, entry in read_manifest(folder).tensors.items()}
        apply_delta(folder / DELTA_FILE, self.matrices)
        self.others |= whole

    @contextmanager
    def serve(self) -> Iterator[Sources]:
        """The engine's tensors as files that other processes of this user can open until the block is left."""
        descriptors: list[int] = []
        try:
            sources: Sources = []
            self.checksums = {}
            for tensors in self._group():
                self.checksums |= {name: checksum_tensors([(name, tensor)]) for name, tensor in tensors.items()}
                descriptors.append(os.memfd_create("longstraw-weights"))
                with open(descriptors[-1], "wb", closefd=False) as file:
                    file.write(save(tensors))
                sources.append((f"/proc/{os.getpid()}/fd/{descriptors[-1]}", None))
            by_file: dict[Path, list[str]] = {}
            for name, file in self.others.items():
                by_file.setdefault(file, []).append(name)
            yield sources + [(str(file), names) for file, names in by_file.items()]
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _group(self) -> Iterator[dict[str, torch.Tensor]]:
        """The checkpoint's tensors of the matrices, some at a time."""
        group, size = {}, 0
        for weight in self.weights:
            whole = self.matrices[weight.name]
            whole = whole if self.dtype == torch.float32 else round_as_trainer(whole)
            group |= {name: part.contiguous() for name, part in weight.split(whole)}
            size += whole.nbytes
            if size >= _FILE_BYTES:
                yield group
                group, size = {}, 0
        if group:
            yield group


def _read_matrix(weight: MappedWeight, files: dict[str, Path], folder: str | Path) -> torch.Tensor:
    """One weight of the trainer, float32, from the checkpoint's tensors."""
    parts = []
    for name, shape in weight.sources:
        if name not in files:
            raise ValueError(f"{folder} has no {name}, which updates move.")
        with safe_open(str(files[name]), framework="pt") as file:
            tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape or tensor.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"{folder} has {name} as {tensor.dtype} {list(tensor.shape)}, and updates move {list(shape)}.")
        parts.append(tensor.float())
    merged = weight.layout.merge(parts)
    return merged.clone() if len(parts) == 1 else merged  # a tensor of its own: the file's may be read-only pages
