"""The weights that the engine holds: their version, and how a folder of the trainer's becomes the next.

    full         every rank loads the folder's tensors
    delta        a host copy is moved, and every rank loads what it has become
    lora         the frozen weights stay; vLLM takes the adapter
    unchanged    the same weights are another version

A sync that is refused leaves the weights as they are. From the moment that tensors begin to move until all have arrived as
they were written, the engine holds no weights. After any sync, vLLM's cached prefixes are gone.

Left out: what is done to the tensors on a rank (`worker`).
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine

from longstraw.rollout.host_copy import HostCopy, Sources
from longstraw.rollout.protocol import WeightVersionError
from longstraw.rollout.weight_folder import (
    MANIFEST, MAP_FILE, FolderManifest, check_files, checksum_folder, compare_checksums, join_tensor_checksums,
    read_manifest, tensor_files,
)
from longstraw.rollout.weight_map import read_map


def read_start(folder: str, version: int) -> tuple[int, dict[str, str], str | None]:
    """(version, checksums, lineage) of the folder that the engine starts from; of one without a manifest: (`version`, none,
    None).

    Raises ValueError where the content is not what the manifest says, or is no whole model's.
    """
    if not (Path(folder) / MANIFEST).exists():
        return version, {}, None
    manifest = read_manifest(folder)
    if manifest.kind != "full":
        raise ValueError(f"--model {folder} is of kind {manifest.kind}: start from full weights, and sync to it")
    check_files(folder, manifest)
    return manifest.version, {name: entry.checksum for name, entry in manifest.tensors.items()}, manifest.lineage


class HeldWeights:
    """See the module.

    load: has every rank load sources, and gives the checksums of the tensors that arrived. dtype: that the engine computes
    in. version: None where the engine has started without weights. lineage: see `FolderManifest`.
    """

    def __init__(
        self, engine: "LLMEngine", load: Callable[[Sources], dict[str, str]], *, dtype: str, max_lora_rank: int,
        folder: str, version: int | None, checksums: dict[str, str], lineage: str | None = None,
    ):
        self.engine, self.load, self.dtype, self.max_lora_rank = engine, load, dtype, max_lora_rank
        self.version = version
        self.adapter: "LoRARequest | None" = None
        self._full_folder = folder
        # the versions that the full folder's weights are (a step can leave them alone), while the engine has those or an
        # adapter of them; with their lineage
        self._full_versions: dict[int, str | None] = {} if version is None else {version: lineage}
        self._lineage = lineage
        self._checksums = checksums
        self._copy: HostCopy | None = None

    @property
    def builds_on(self) -> dict[int, str | None]:
        """The versions that the next update may be one of, with their lineage."""
        if self.version is None:
            return {}
        return self._full_versions | {self.version: self._lineage}

    @property
    def _holds_whole(self) -> bool:
        """Whether the weights are those of the full folder, with nothing beside them."""
        return self.adapter is None and self.version in self._full_versions

    def describe(self) -> dict[str, Any]:
        """What clients are told: the version, those that an update may build on, and the lineage of each."""
        held = self.builds_on
        return {
            "weight_version": self.version, "builds_on": list(held),
            "lineages": {str(version): lineage for version, lineage in held.items()},
        }

    def require(self, version: int) -> None:
        """Raise WeightVersionError unless the engine holds weights of this version."""
        if self.version is None:
            raise WeightVersionError("the engine holds no weights: a weight sync must complete first")
        if version != self.version:
            raise WeightVersionError(f"the engine holds weights of version {self.version}, not {version}")

    def checksums(self) -> dict[str, str]:
        """Of every tensor that was loaded, by its name in the checkpoint; an adapter's are not among them."""
        if self.version is not None and not self._checksums:
            self._checksums = checksum_folder(self._full_folder)  # of a start without a manifest
        return self._checksums

    def drop(self) -> None:
        """Hold none, until the next sync."""
        self._remove_adapter()
        self.version, self._checksums, self._copy = None, {}, None

    def sync(self, path: str, version: int) -> dict[str, Any]:
        """Take a folder that the trainer wrote; returns its kind, bytes and seconds.

        version: that the folder must hold. Raises ValueError: the folder is not whole, another's, or for other weights
        (nothing has changed); or a tensor arrived with other bits than were written (the engine holds no weights then).
        """
        started = time.perf_counter()
        manifest = read_manifest(path)
        if manifest.version != version:
            raise ValueError(f"{path} holds version {manifest.version}, not {version}.")
        take = {"full": self._take_full, "delta": self._take_delta, "lora": self._take_adapter}.get(manifest.kind)
        if take is None:
            self._require_base(path, manifest)
            if self._holds_whole:
                self._full_versions[version] = manifest.lineage
        else:
            take(path, manifest)
        if not self.engine.reset_prefix_cache():
            self.version = None
            raise RuntimeError("vLLM did not clear its prefix cache")
        self.version, self._lineage = version, manifest.lineage
        return {"kind": manifest.kind, "bytes": manifest.payload_bytes, "seconds": time.perf_counter() - started}

    def _take_full(self, path: str, manifest: FolderManifest) -> None:
        wanted = {name: entry.checksum for name, entry in manifest.tensors.items()}
        self._remove_adapter()
        if manifest.full_precision:
            check_files(path, manifest)
            copy = HostCopy.open(path, read_map(Path(path) / MAP_FILE), self.dtype)
            with copy.serve() as sources:
                self._load(sources, wanted | copy.checksums, path)
            self._copy = copy
        else:
            sources = [(str(file), None) for file in sorted(set(tensor_files(path).values()))]
            self._load(sources, wanted, path)
            self._copy = None
        self._full_folder, self._full_versions = path, {manifest.version: manifest.lineage}

    def _take_delta(self, path: str, manifest: FolderManifest) -> None:
        self._require_base(path, manifest)
        if self.adapter is not None:
            raise ValueError(f"{path} is an update of whole weights, and the engine serves an adapter.")
        check_files(path, manifest)
        copy = self._copy
        if copy is None:
            if not self._holds_whole:
                raise ValueError(f"{path} updates version {self.version}, of which {self._full_folder} is not the whole.")
            copy = HostCopy.open(self._full_folder, read_map(Path(path) / MAP_FILE), self.dtype)
        self._copy = None  # until the update is known to be whole
        try:
            copy.apply(path)
        except ValueError as error:
            self._copy = copy if "was applied" not in str(error) else None
            raise
        self._full_versions = {}  # the engine's weights leave those of the full folder
        rest = {name: entry.checksum for name, entry in manifest.tensors.items()}
        with copy.serve() as sources:
            self._load(sources, self.checksums() | rest | copy.checksums, path)
        self._copy = copy

    def _take_adapter(self, path: str, manifest: FolderManifest) -> None:
        if not self.max_lora_rank:
            raise ValueError(f"{path} is a low-rank adapter, and the server takes none: start it with --max-lora-rank.")
        if self.version is None or manifest.base_version not in self._full_versions:
            raise ValueError(f"{path} adapts the weights of version {manifest.base_version}, which the engine does not hold.")
        if manifest.base_checksum != join_tensor_checksums(self.checksums()):
            raise ValueError(f"{path} adapts other weights than those that the engine holds.")
        check_files(path, manifest)
        from vllm.lora.request import LoRARequest

        adapter = LoRARequest(
            lora_name=f"version-{manifest.version}", lora_int_id=manifest.version + 1, lora_path=path, load_inplace=True
        )
        self.version = None
        self._remove_adapter()
        if not self.engine.add_lora(adapter):
            raise ValueError(f"vLLM did not take the adapter {path}.")
        self.adapter = adapter

    def _require_base(self, path: str, manifest: FolderManifest) -> None:
        if self.version is None or manifest.base_version not in (self._full_versions if self._holds_whole else [self.version]):
            held = "no weights" if self.version is None else f"version {self.version}"
            raise ValueError(f"{path} builds on version {manifest.base_version}, and the engine holds {held}.")

    def _load(self, sources: Sources, wanted: dict[str, str], path: str) -> None:
        """Have every rank load; nothing is held until all tensors have arrived as `wanted`."""
        self.version, self._checksums = None, {}
        found = self.load(sources)
        compare_checksums(wanted, found, path)
        self._checksums = found

    def _remove_adapter(self) -> None:
        if self.adapter is not None:
            self.engine.remove_lora(self.adapter.lora_int_id)
            self.adapter = None
