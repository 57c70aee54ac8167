"""The ranks of `test_weight_sync.py`: runs of the program that leave weight versions, and what is in them.

    weight_sync_ranks.py 2 RENDEZVOUS FOLDER [check ...]
"""

import os
import shutil
import sys
from pathlib import Path
from unittest import mock

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from longstraw.rollout.host_copy import HostCopy
from longstraw.rollout.weight_folder import (
    MAP_FILE, check_files, checksum_folder, list_versions, plan_syncs, read_manifest, tensor_files, version_folder,
)
from longstraw.rollout.weight_map import read_map
from megatron.grpo.agreed_writes import WriteFailure
from megatron.grpo.arguments import resolve_preset
from megatron.grpo.conversion.weights import hf_tensors
from tests.ranks.training_ranks import Runner
from tests.support.ranks import fork_ranks

DENSE = "--model-preset tiny-llama --num-layers 2 --train-iters 2 --weight-sync-keep 0"
TP2 = "--context-parallel-size 1 --tensor-model-parallel-size 2"
LOGRA = "--optimizer logra --logra-rank 8 --update-step-size update-ratio"


def run(runner: Runner, name: str, flags: str, *, root: str = "") -> tuple[list[dict], Path, dict[int, dict]]:
    """(metrics, --weight-sync-dir, step -> the model's weights after it by HF name, as conversion puts them together)."""
    folder, seen = runner.folder / "weights" / (root or name), {}

    def watch(trainer):
        write, preset = trainer.weight_sync.write, resolve_preset(trainer.args)

        def write_and_gather(number, *, changed):
            metrics = write(number, changed=changed)
            if not trainer.args.lora_rank:
                seen[number] = {n: t.cpu().clone() for n, t in hf_tensors(trainer.step.engine.model, preset)}
            return metrics

        trainer.weight_sync.write = write_and_gather

    records = runner.run(name, f"{flags} --weight-sync-dir {folder}", prepare=watch)
    return records, folder, seen


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a full folder, which is checked on the way."""
    manifest = read_manifest(folder)
    assert manifest.kind == "full", manifest.kind
    check_files(folder, manifest)
    assert checksum_folder(folder) == {name: entry.checksum for name, entry in manifest.tensors.items()}
    return {n: t for path in set(tensor_files(folder).values()) for n, t in load_file(path).items()}


def assert_same(found: dict, wanted: dict) -> None:
    """The same names and bits."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    wrong = [n for n, t in wanted.items() if t.dtype != found[n].dtype or not torch.equal(t, found[n])]
    assert not wrong, wrong


def follow(root: Path, version: int, dtype: str) -> HostCopy:
    """A host copy that has come to a version by the updates of a run."""
    base, *updates = plan_syncs(root, (), version)
    assert updates, "there was nothing to follow"
    copy = HostCopy.open(base, read_map(base / MAP_FILE), dtype)
    for folder in updates:
        copy.apply(folder)
    return copy


def served(copy: HostCopy) -> dict[str, torch.Tensor]:
    """What an engine would load."""
    with copy.serve() as sources:
        loaded = [(load_file(path), names) for path, names in sources]
    return {n: t for tensors, names in loaded for n, t in tensors.items() if names is None or n in names}


def check_full(runner: Runner) -> None:
    """Each version is what conversion would export; both ranks have written about half of it."""
    records, root, weights = run(runner, "full", f"{DENSE} {TP2} --weight-sync full")
    assert all(r["weight_sync_bytes"] > 0 and r["weight_sync_seconds"] > 0 for r in records), records
    if runner.rank:
        return
    assert sorted(list_versions(root)) == [0, 1, 2]
    for number in (1, 2):
        assert_same(read_tensors(version_folder(root, number)), weights[number])
        sizes = [sum(e.bytes for n, e in read_manifest(version_folder(root, number)).files.items() if n.startswith(start))
                 for start in ("model-00000", "model-00001")]  # fmt: skip
        assert 0.5 < sizes[0] / sizes[1] < 2.0, sizes
    assert any(not torch.equal(weights[1][n], weights[2][n]) for n in weights[1])


def check_delta(runner: Runner) -> None:
    """Updates lead to the bits of the weights, at TP 2 and with the other weights trained beside them, in fewer bytes."""
    for name, flags in (("delta", LOGRA), ("rest", f"{LOGRA} --logra-train-rest")):
        records, root, weights = run(runner, name, f"{DENSE} {TP2} {flags} --weight-sync delta")
        if runner.rank:
            continue
        assert [m.kind for _, m in sorted(list_versions(root).items())] == ["full", "delta", "delta"]
        assert bool(read_manifest(version_folder(root, 1)).tensors) == (name == "rest")
        copy = follow(root, 2, "float32")
        assert_same(served(copy), weights[2])
        try:
            copy.apply(version_folder(root, 2))
        except ValueError as error:
            assert "they hold it already" in str(error)
        else:
            raise AssertionError("an update was made twice")
        assert_same(served(copy), weights[2])


def check_masters(runner: Runner) -> None:
    """bfloat16 over two replicas: whole weights are at full precision, and what is served has the trainer's bits."""
    flags = f"{DENSE} --context-parallel-size 1 --prompts-per-step 2 --bf16 {LOGRA} --logra-update-ratio 1e-3 --train-iters 3"
    _, root, weights = run(runner, "masters", f"{flags} --weight-sync delta --weight-sync-full-interval 2")
    if runner.rank:
        return
    manifests = list_versions(root)
    assert [(m.kind, m.full_precision) for _, m in sorted(manifests.items())] == [
        ("full", True), ("delta", False), ("full", True), ("delta", False),
    ]
    assert [path.name for path in plan_syncs(root, (), 3)] == ["version-2", "version-3"]
    first, third = follow(root, 1, "bfloat16"), follow(root, 3, "bfloat16")
    assert_same(served(first), weights[1])
    assert_same(served(third), weights[3])
    exact = HostCopy.open(version_folder(root, 2), third.weights, "float32").matrices
    assert any(not torch.equal(t, t.bfloat16().float()) for t in exact.values()), "no weight was between two bfloat16"


def check_experts(runner: Runner) -> None:
    """Experts are written by the ranks that hold them, under their numbers of all."""
    flags = "--model-preset tiny-glm5.2 --num-layers 2 --moe-layer-freq [0,1] --expert-model-parallel-size 2 --train-iters 1"
    _, root, weights = run(runner, "experts", f"{flags} --weight-sync full")
    if runner.rank:
        return
    folder = version_folder(root, 1)
    assert_same(read_tensors(folder), weights[1])
    experts = {n: e.file for n, e in read_manifest(folder).tensors.items() if ".mlp.experts." in n}
    owners = {(int(n.split(".experts.")[1].split(".")[0]), file.split("-")[1]) for n, file in experts.items()}
    count = len({number for number, _ in owners})
    assert owners == {(number, f"{number // (count // 2):05d}") for number in range(count)}, owners


def check_adapter(runner: Runner) -> None:
    """Frozen weights and the adapter make the weights that a full sync of the same run has merged."""
    pairs = f"{DENSE} {TP2} --lora-rank 4 --lora-alpha 8"
    _, root, _ = run(runner, "lora", f"{pairs} --weight-sync lora")
    _, merged, _ = run(runner, "merged", f"{pairs} --weight-sync full")
    if runner.rank:
        return
    manifest = read_manifest(version_folder(root, 2))
    assert (manifest.kind, manifest.base_version) == ("lora", 0)
    assert manifest.base_checksum == read_manifest(version_folder(root, 0)).checksum
    weights, adapter = read_tensors(version_folder(root, 0)), load_file(version_folder(root, 2) / "adapter_model.safetensors")
    wanted, moved = read_tensors(version_folder(merged, 2)), 0
    for name in {key.removeprefix("base_model.model.").split(".lora_")[0] for key in adapter}:
        a, b = (adapter[f"base_model.model.{name}.lora_{which}.weight"] for which in "AB")
        weight = weights[f"{name}.weight"]
        moved += not torch.equal(weight, wanted[f"{name}.weight"])
        weight += 8 / 4 * (b @ a)
    assert moved == 14, moved  # q k v o gate up down of two layers
    for name, tensor in wanted.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-7)


def check_resume(runner: Runner) -> None:
    """A run that goes on keeps the version that it was saved with, removes later ones and unfinished folders, and writes anew
    what is not its own. Old versions are removed, but not those that others build on."""
    flags = f"{DENSE} {TP2} {LOGRA} --weight-sync delta --save {runner.folder}/synced --save-interval 1"
    run(runner, "before", flags, root="resumed")
    root = runner.folder / "weights" / "resumed"
    if runner.rank == 0:
        shutil.copytree(version_folder(root, 2), version_folder(root, 9))
        version_folder(root, 3).mkdir()
        kept = (version_folder(root, 2) / "manifest.json").stat().st_mtime_ns
    again = flags.replace("--train-iters 2", "--train-iters 4").replace("--weight-sync-keep 0", "--weight-sync-keep 1")
    again = again.replace("--save ", "--load ").replace("--save-interval 1", "--ckpt-step 2")
    _, _, weights = run(runner, "after", again, root="resumed")
    if runner.rank == 0:
        assert sorted(list_versions(root)) == [0, 1, 2, 3, 4] and not version_folder(root, 9).exists()
        assert (version_folder(root, 2) / "manifest.json").stat().st_mtime_ns == kept
        assert_same(served(follow(root, 4, "float32")), weights[4])
    _, _, weights = run(runner, "other", again.replace("--ckpt-step 2", "--ckpt-step 1 --seed 6"), root="resumed")
    if runner.rank == 0:
        assert_same(served(follow(root, 4, "float32")), weights[4])
        path = version_folder(root, 1) / "manifest.json"
        path.write_text(path.read_text().replace('"identity": "sha256:', '"identity": "sha256:other'))
    _, _, weights = run(runner, "foreign", again.replace("--ckpt-step 2", "--ckpt-step 1"), root="resumed")
    if runner.rank == 0:
        assert {n: m.kind for n, m in list_versions(root).items()} == {1: "full", 2: "delta", 3: "delta", 4: "delta"}
        assert_same(served(follow(root, 4, "float32")), weights[4])


def check_unchanged(runner: Runner) -> None:
    """A step that leaves the weights alone (every response is cut off, and masked) gives a version without tensors."""
    flags = f"{DENSE} {TP2} --max-response-length 1 --mask-truncated --weight-sync full"
    records, root, _ = run(runner, "unchanged", flags)
    if runner.rank == 0:
        found = list_versions(root)
        assert [found[n].kind for n in (0, 1, 2)] == ["full", "unchanged", "unchanged"]
        assert found[2].identity == found[0].identity and found[2].base_version == 1
        assert [path.name for path in plan_syncs(root, (), 2)] == ["version-0", "version-1", "version-2"]
        assert [r["weight_sync_bytes"] for r in records] == [0, 0]


def check_damaged(runner: Runner) -> None:
    """Folders that are damaged, or were being removed when the run was killed, are written again; a run goes on."""
    flags = f"{DENSE} {TP2} --weight-sync full"
    run(runner, "whole", f"{flags} --save {runner.folder}/damaged --save-interval 1", root="damaged")
    root = runner.folder / "weights" / "damaged"
    if runner.rank == 0:
        path = next(version_folder(root, 2).glob("model-*"))
        path.write_bytes(path.read_bytes()[:-1])
        next(version_folder(root, 1).glob("model-*")).unlink()
        (version_folder(root, 0) / "manifest.json").write_text("{")
    again = flags.replace("--train-iters 2", "--train-iters 3")
    _, _, weights = run(runner, "mended", f"{again} --load {runner.folder}/damaged", root="damaged")
    if runner.rank == 0:
        assert sorted(list_versions(root)) == [2, 3] and not version_folder(root, 1).exists()
        assert_same(read_tensors(version_folder(root, 3)), weights[3])
        read_tensors(version_folder(root, 2))


def check_full_disk(runner: Runner) -> None:
    """A folder that takes no more, on one rank, ends the run on both after the step, which is saved; the run can go on."""
    for name, kind, at, guilty in (
        ("shards", f"{DENSE} {TP2} --weight-sync full", "longstraw.rollout.weight_export.save_file", 1),
        ("update", f"{DENSE} {TP2} {LOGRA} --weight-sync delta", "megatron.grpo.weight_deltas.write_delta", 0),
    ):
        saved = runner.folder / f"full-{name}"

        def fill_disk(trainer, at=at, guilty=guilty):
            def no_space(*given, **more):
                raise SafetensorError("I/O error: No space left on device (os error 28)")

            if runner.rank == guilty:
                patches.append(mock.patch(at, no_space))
                patches[-1].start()

        patches: list = []
        flags = f"{kind} --weight-sync-dir {runner.folder}/weights/full-{name}"
        try:
            runner.run(name, f"{flags} --save {saved} --save-interval 9", prepare=fill_disk)
        except WriteFailure as error:
            assert f"full-{name} cannot take version 1: I/O error: No space left" in str(error), error
            assert str(error).startswith("--weight-sync-dir ") and "\n" not in str(error)
        else:
            raise AssertionError("nothing was said of a full disk")
        for patch in patches:
            patch.stop()
        assert (saved / "latest_checkpointed_iteration.txt").read_text() == "1"
        assert len((runner.folder / name / "metrics.jsonl").read_text().splitlines()) == 1
        runner.run(f"{name}-on", f"{flags} --load {saved}")
        if runner.rank == 0:
            assert sorted(list_versions(runner.folder / "weights" / f"full-{name}")) == [0, 1, 2]


def check_other_weights(runner: Runner) -> None:
    """What updates do not move is part of a folder's identity: one with another norm is written again."""
    flags = f"{DENSE} {TP2} {LOGRA} --weight-sync delta"
    _, root, _ = run(runner, "norms", flags)
    before = list_versions(root)[0] if runner.rank == 0 else None

    def look(trainer):
        found.append(trainer.weight_sync.versions.identity())
        versions = trainer.weight_sync.versions
        versions._rest = ""
        with torch.no_grad():
            trainer.step.engine.model.decoder.final_layernorm.weight.add_(1.0)
        found.append(versions.identity())

    found: list = []
    runner.run("norms-again", f"{flags} --weight-sync-dir {root}", prepare=look)
    if runner.rank == 0:
        assert before.identity == found[0] != found[1], found


CHECKS = (
    check_full, check_delta, check_masters, check_experts, check_adapter, check_resume, check_unchanged, check_damaged,
    check_full_disk, check_other_weights,
)


def main(rank: int, ranks: int, arguments: list[str]) -> None:
    folder, *only = arguments
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}  # as torchrun says it; the flags are checked against it
    runner = Runner(rank, ranks, Path(folder), "")
    for check in CHECKS:
        if not only or check.__name__ in only:
            check(runner)
            print(check.__name__, flush=True) if rank == 0 else None
    runner.end()


if __name__ == "__main__":
    fork_ranks(main)
