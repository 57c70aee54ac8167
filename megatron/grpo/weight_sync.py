"""After each step, the weights for a rollout engine: DIR/version-K after step K (--weight-sync, --weight-sync-dir).

    sync = open_weight_sync(args, config, model, update, groups, resumed_step=done)
    sync.start()                             version-`done` is there, and no later one
    sync.write(number, changed=True)         version-`number`; its bytes and seconds

A folder is complete once its manifest is there, which is written last. A run that goes on from a checkpoint removes the
versions after it, since those steps are done again, and keeps its own last one if that holds the very weights that were
loaded; else it writes them whole.

Left out: telling the engine (`longstraw.rollout.vllm_client`) and sending folders to machines that do not see them.
"""

import time
from argparse import Namespace
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from longstraw.rollout.weight_export import open_folder, remove_folder
from longstraw.rollout.weight_folder import FolderManifest, list_versions, plan_syncs, read_manifest, version_folder, write_manifest
from longstraw.transaction.commit import agree_on_failure
from megatron.grpo.agreed_writes import WriteFailure, write_on_rank_0
from megatron.grpo.weight_lineage import WeightLineage
from megatron.grpo.weight_sync_config import WeightSyncConfig
from megatron.grpo.weight_update import WeightUpdate
from megatron.grpo.weight_versions import AdapterVersions, DeltaVersions, FullVersions


def open_weight_sync(
    args: Namespace, config: WeightSyncConfig, model: torch.nn.Module, update: WeightUpdate, groups, *, resumed_step: int,
    lineage: WeightLineage | None,
) -> "WeightSync | None":
    """What --weight-sync asks for. Collective. update: has the LoGRA steps noted by the writer of updates.
    lineage: what versions say of themselves.

    Raises ValueError, on every rank, where the folder cannot be made.
    """
    if config.weight_sync == "none":
        return None
    if config.weight_sync == "delta":
        versions = DeltaVersions(args, model, groups, lineage, update.optimizer, every=config.weight_sync_full_interval)
        update.deltas = versions
    else:
        versions = (AdapterVersions if config.weight_sync == "lora" else FullVersions)(args, model, groups, lineage)
    return WeightSync(versions, Path(config.weight_sync_dir), keep=config.weight_sync_keep, resumed_step=resumed_step)


class WeightSync:
    """See the module. keep: versions that stay, besides those that they build on; 0 for all."""

    def __init__(self, versions: FullVersions, root: Path, *, keep: int, resumed_step: int):
        self.versions, self.root, self.keep, self.resumed_step = versions, root, keep, resumed_step
        message = agree_on_failure(self._make_root() if dist.get_rank() == 0 else "", dist.group.WORLD)
        if message:
            raise ValueError(message)

    def start(self) -> None:
        """Have the version of the weights as they are; remove what a run that was here before wrote after it, and what is not
        whole. Collective. Raises WriteFailure, on every rank, where that fails."""
        identity = self.versions.identity()
        with self._naming(self.resumed_step):
            if not write_on_rank_0(lambda: self._clear_and_look(identity)):
                self.versions.write_start(self.root, self.resumed_step)

    def write(self, number: int, *, changed: bool) -> dict:
        """After step `number` is committed -> `weight_sync_bytes` and `weight_sync_seconds`. Collective.

        changed: whether the step moved the weights; if not, the version is the one before under another number.
        Raises WriteFailure, on every rank, where a rank cannot write; the folder has no version `number` then.
        """
        started = time.perf_counter()
        with self._naming(number):
            size = self.versions.write(self.root, number) if changed else write_on_rank_0(lambda: self._repeat(number))
            if self.keep:
                write_on_rank_0(lambda: remove_old_versions(self.root, self.keep))
        return {"weight_sync_bytes": size, "weight_sync_seconds": time.perf_counter() - started}

    @contextmanager
    def _naming(self, number: int):
        """A failure to write says where and what."""
        try:
            yield
        except WriteFailure as error:
            raise WriteFailure(f"--weight-sync-dir {self.root} cannot take version {number}: {error}") from None

    def _clear_and_look(self, identity: str) -> bool:
        """Whether the version that was loaded is there, once all that must go is gone."""
        found = list_versions(self.root)
        for folder in self.root.glob("version-*"):
            number = folder.name.removeprefix("version-")
            if number.isdecimal() and (int(number) > self.resumed_step or int(number) not in found):
                remove_folder(folder)
        return self._is_ours(found, identity)

    def _repeat(self, number: int) -> int:
        folder = version_folder(self.root, number)
        open_folder(folder)
        identity = read_manifest(version_folder(self.root, number - 1)).identity
        write_manifest(folder, FolderManifest(
            kind="unchanged", version=number, base_version=number - 1, identity=identity, lineage=self.versions.lineage
        ))
        return 0

    def _make_root(self) -> str:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return f"--weight-sync-dir {self.root} cannot be made: {error}"
        return ""

    def _is_ours(self, found: Mapping[int, FolderManifest], identity: str) -> bool:
        """Whether the folder of the version that was loaded holds these weights, with all that it builds on."""
        own = found.get(self.resumed_step)
        if own is None or (own.identity, own.lineage) != (identity, self.versions.lineage):
            return False
        try:
            plan_syncs(self.root, (), self.resumed_step)
        except ValueError:
            return False
        return True


def remove_old_versions(root: Path, keep: int) -> None:
    """Remove all versions but the last `keep` and those that they build on."""
    found = list_versions(root)
    wanted: set[int] = set()
    for number in sorted(found)[-keep:]:
        while number is not None and number not in wanted:
            wanted.add(number)
            number = found[number].base_version if number in found else None
    for number in found.keys() - wanted:
        remove_folder(version_folder(root, number))
