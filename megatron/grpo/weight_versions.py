"""What a weight version is made of, by kind: whole weights, an update of them, or an adapter beside them.

`FullVersions`, `DeltaVersions` and `AdapterVersions` write one folder each; `megatron.grpo.weight_sync` says which and when.
Methods are collective, and raise WriteFailure on every rank where one cannot write. `identity` is a checksum of the trainer's own weights, by which a
run that goes on knows a folder of its own.
"""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from longstraw.patches.lora import find_pairs, is_pair
from longstraw.receipts.collect import checksum_tensors, join_checksums
from longstraw.rollout.weight_export import complete_folder, open_folder
from longstraw.rollout.weight_folder import (
    DELTA_FILE, MAP_FILE, FolderManifest, hash_file, read_manifest, read_version, version_folder, write_manifest,
)
from longstraw.rollout.weight_map import MappedWeight, write_map
from megatron.grpo.agreed_writes import write_on_rank_0
from megatron.grpo.adapter_export import ADAPTER_FILES, gather_adapter, write_adapter
from megatron.grpo.arguments import resolve_preset
from megatron.grpo.conversion.architecture import hf_config_from_preset
from megatron.grpo.conversion.checkpoint_folder import HF_FOLDER
from megatron.grpo.conversion.hf_reader import read_config
from megatron.grpo.conversion.names import map_parameters
from megatron.grpo.conversion.weights import most_common_dtype
from megatron.grpo.logra import LograOptimizer
from megatron.grpo.weight_deltas import DeltaWriter
from megatron.grpo.weight_lineage import WeightLineage
from megatron.grpo.whole_weights import Read, WholeWeights, merged


class FullVersions:
    """Whole weights each time, with low-rank pairs merged in."""

    def __init__(self, args: Namespace, model: torch.nn.Module, groups, lineage: WeightLineage | None = None):
        self._lineage = lineage
        self.args, self.model, self.groups, self.preset = args, model, groups, resolve_preset(args)

    @property
    def lineage(self) -> str | None:
        """Of the weights as they are, for manifests."""
        return None if self._lineage is None else self._lineage.value

    def identity(self) -> str:
        """One checksum over every rank's weights, equal on every rank."""
        return self._checksum(lambda name: True)

    def write_start(self, root: Path, number: int) -> None:
        """A version of the weights as they are, that stands on its own."""
        self._write_whole(version_folder(root, number), FolderManifest(
            kind="full", version=number, identity=self.identity(), lineage=self.lineage
        ), merged(self.model))

    def write(self, root: Path, number: int) -> int:
        """The version after a step that has moved the weights -> bytes."""
        return self._write_whole(version_folder(root, number), FolderManifest(
            kind="full", version=number, identity=self.identity(), lineage=self.lineage
        ), merged(self.model))

    def _checksum(self, wanted) -> str:
        gathered: list = [None] * dist.get_world_size()
        own = checksum_tensors((n, p.data) for n, p in self.model.named_parameters() if wanted(n))
        dist.all_gather_object(gathered, own)
        return join_checksums(gathered)

    def _write_whole(self, folder: Path, manifest: FolderManifest, read: Read | None, extra: dict | None = None) -> int:
        """extra: name -> what writes the file of that name, given its path."""
        extra = extra or {}

        def begin() -> None:
            open_folder(folder)
            for name, write in extra.items():
                write(folder / name)

        def complete() -> int:
            config = hf_config_from_preset(self.preset, dtype=self._dtype(), source=self._source_config())
            return complete_folder(folder, reports, manifest, config=config, extra_files=tuple(extra)).payload_bytes

        write_on_rank_0(begin)
        reports = WholeWeights(self.model, self.preset, self.groups, read=read).write(folder)
        return write_on_rank_0(complete)

    def _dtype(self) -> str:
        return str(most_common_dtype(self.model)).removeprefix("torch.")

    def _source_config(self) -> dict | None:
        """The config.json that the model was converted from, where it was kept: it has the ids of special tokens."""
        for folder in (Path(self.args.pretrained_checkpoint or "") / HF_FOLDER, Path(self.args.tokenizer_path or "")):
            if (folder / "config.json").is_file():
                return read_config(folder)
        return None

    def _complete(self, folder: Path, manifest: FolderManifest, names) -> int:
        """Write the manifest of a folder whose files are all there -> their bytes. Rank 0."""
        manifest = replace(manifest, files={name: hash_file(folder / name) for name in names})
        write_manifest(folder, manifest)
        return manifest.payload_bytes


class DeltaVersions(FullVersions):
    """LoGRA's updates; whole weights, at float32 where the optimizer keeps that, at the start and every `every` versions."""

    def __init__(
        self, args: Namespace, model: torch.nn.Module, groups, lineage: WeightLineage | None, optimizer: LograOptimizer, *,
        every: int,
    ):
        super().__init__(args, model, groups, lineage)
        self.optimizer, self.every, self._rest = optimizer, every, ""
        self.deltas = DeltaWriter(optimizer)
        names = {weight.name for _, weight in optimizer.updated_model.pairs}
        gathered: list = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, names)
        moved = set().union(*gathered)
        self.map = [
            MappedWeight(e.megatron, e.sources, e.layout) for e in map_parameters(self.preset) if e.megatron in moved
        ]

    def identity(self) -> str:
        """Of the float32 weights that updates move, and of all others: embeddings, norms, the output layer."""
        if self.optimizer.rest is not None or not self._rest:  # without an optimizer they stay as they are
            moved = {matrix.name for matrix, _ in self.optimizer.updated_model.pairs}
            self._rest = self._checksum(lambda name: name not in moved)
        return join_checksums([self.deltas.base_checksum(), self._rest])

    def note(self, number: int, step: float) -> None:
        """Before the weights move by an update of length `step`."""
        if not self._is_due_whole(number):
            self.deltas.note(number, step)

    def finish(self) -> dict:
        """After they have moved: nothing yet. The version is written when the step is committed."""
        return {}

    def write_start(self, root: Path, number: int) -> None:
        """See `FullVersions`."""
        self._write_full(root, number)

    def write(self, root: Path, number: int) -> int:
        """See `FullVersions`."""
        if self._is_due_whole(number):
            self.deltas.forget()
            return self._write_full(root, number)
        folder = version_folder(root, number)

        def begin() -> None:
            open_folder(folder)
            write_map(folder / MAP_FILE, self.map)

        write_on_rank_0(begin)
        self.deltas.write(folder / DELTA_FILE)
        reports = []
        if self.optimizer.rest is not None:
            moved = {weight.name for weight in self.map}
            reports = WholeWeights(self.model, self.preset, self.groups).write(folder, names=lambda name: name not in moved)
        identity = self.identity()
        names = [DELTA_FILE, MAP_FILE, *(name for report in reports for name in report.files)]
        tensors = {name: entry for report in reports for name, entry in report.tensors.items()}
        manifest = FolderManifest(
            kind="delta", version=number, base_version=number - 1, identity=identity, lineage=self.lineage, tensors=tensors
        )
        return write_on_rank_0(lambda: self._complete(folder, manifest, names))

    def _is_due_whole(self, number: int) -> bool:
        return bool(self.every) and number % self.every == 0

    def _write_full(self, root: Path, number: int) -> int:
        full = {
            matrix.name: weight for matrix, weight in self.optimizer.updated_model.pairs if weight.masters is not None
        }

        def read(name: str, tensor: torch.Tensor) -> torch.Tensor:
            weight = full.get(name)
            return tensor.detach() if weight is None else weight.masters.whole(weight.weight.data)

        manifest = FolderManifest(
            kind="full", version=number, identity=self.identity(), lineage=self.lineage,
            full_precision=self._dtype() == "bfloat16",
        )
        return self._write_whole(
            version_folder(root, number), manifest, read, {MAP_FILE: lambda path: write_map(path, self.map)}
        )


class AdapterVersions(FullVersions):
    """Low-rank pairs as adapters of the frozen weights, which are version 0."""

    def write_start(self, root: Path, number: int) -> None:
        """The frozen weights, unless they are there, and the adapter as it is (at version 0, of no effect: none)."""
        frozen = self._checksum(lambda name: not is_pair(name))
        origin = None if self._lineage is None else self._lineage.origin
        found = write_on_rank_0(lambda: read_version(root, 0))
        if found is None or (found.identity, found.lineage) != (frozen, origin):
            self._write_whole(version_folder(root, 0), FolderManifest(
                kind="full", version=0, identity=frozen, lineage=origin
            ), None)
        if number > 0:
            self.write(root, number)

    def write(self, root: Path, number: int) -> int:
        """See `FullVersions`."""
        identity, tensors = self.identity(), gather_adapter(self.model, self.preset, self.groups)
        folder, pair = version_folder(root, number), find_pairs(self.model)[0]

        def write() -> int:
            open_folder(folder)
            write_adapter(folder, tensors, rank=pair.a.shape[0], alpha=pair.alpha)
            base = read_manifest(version_folder(root, 0)).checksum
            return self._complete(folder, FolderManifest(
                kind="lora", version=number, base_version=0, base_checksum=base, identity=identity, lineage=self.lineage
            ), ADAPTER_FILES)

        return write_on_rank_0(write)
