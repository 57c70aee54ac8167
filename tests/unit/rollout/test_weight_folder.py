"""Weight versions on disk: complete or none, every damage found, the way from one version to another."""

import contextlib
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from longstraw.rollout.row_layouts import GroupedQKV, StackedRows
from longstraw.rollout.weight_export import ShardWriter, choose_writers, complete_folder, open_folder, remove_folder
from longstraw.rollout.weight_folder import (
    INDEX, MANIFEST, FolderManifest, check_files, checksum_folder, compare_checksums, list_versions, plan_syncs,
    read_manifest, tensor_files, version_folder, write_manifest,
)
from longstraw.rollout.weight_map import MappedWeight, read_map, write_map
from tests.support.sketches import draw

TENSORS = {f"layer.{i}.weight": draw(8, 16, seed=i, dtype=torch.float32) for i in range(5)}


def write(folder, *, version=0, ranks=2, file_bytes=1100):
    """A full folder as two ranks write it, each its tensors."""
    open_folder(folder)
    writers = choose_writers([t.nbytes for t in TENSORS.values()], [range(ranks)] * len(TENSORS))
    reports = []
    for rank in range(ranks):
        shards = ShardWriter(folder, rank=rank, file_bytes=file_bytes)
        for writer, (name, tensor) in zip(writers, TENSORS.items()):
            if writer == rank:
                shards.add(name, tensor)
        reports.append(shards.close())
    return complete_folder(folder, reports, FolderManifest(kind="full", version=version), config={"dtype": "float32"})


def write_chain(root, kinds):
    """Versions of given kinds, without content: number -> (kind, base)."""
    for number, (kind, base) in kinds.items():
        open_folder(version_folder(root, number))
        write_manifest(version_folder(root, number), FolderManifest(kind=kind, version=number, base_version=base))


def test_a_folder_holds_what_its_ranks_wrote_and_says_so(tmp_path):
    manifest = write(tmp_path / "version-3", version=3)
    folder = tmp_path / "version-3"
    assert read_manifest(folder) == manifest and manifest.version == 3
    check_files(folder, manifest)
    assert checksum_folder(folder) == {name: entry.checksum for name, entry in manifest.tensors.items()}
    files = set(tensor_files(folder).values())
    assert {n: t for path in files for n, t in load_file(path).items()}.keys() == TENSORS.keys()
    assert {path.name.split("-")[1] for path in files} == {"00000", "00001"} and len(files) >= 3
    index = json.loads((folder / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in TENSORS.values())
    assert manifest.payload_bytes == sum(p.stat().st_size for p in folder.iterdir() if p.name != MANIFEST)
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in files), "another user's engine cannot read it"


@pytest.mark.parametrize("name", ["unlink", "rmdir", "fsync"])
def test_a_folder_that_is_being_removed_is_whole_or_none(tmp_path, monkeypatch, name):
    """Killed at each call that changes the disk."""
    real = getattr(os, name)
    for kill in range(4):
        folder, calls = version_folder(tmp_path, kill), []
        write(folder, version=kill)

        def deadly(*given, **more):
            calls.append(given)
            if len(calls) > kill:
                raise KeyboardInterrupt
            return real(*given, **more)

        monkeypatch.setattr(os, name, deadly)
        with contextlib.suppress(KeyboardInterrupt):
            remove_folder(folder)
        monkeypatch.undo()
        if kill in list_versions(tmp_path):
            check_files(folder, read_manifest(folder))
        else:
            assert not (folder / MANIFEST).exists()


def test_what_does_not_read_is_no_version(tmp_path):
    for number in range(5):
        write(version_folder(tmp_path, number), version=number)
    path = next(version_folder(tmp_path, 1).glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    (version_folder(tmp_path, 2) / MANIFEST).write_text("{")
    shutil.copytree(version_folder(tmp_path, 4), version_folder(tmp_path, 9))
    version_folder(tmp_path, 3).joinpath(INDEX).unlink()
    assert sorted(list_versions(tmp_path)) == [0, 4]


def test_writers_share_the_bytes_among_those_that_hold_them():
    sizes = [100, 1, 1, 1, 50, 50]
    writers = choose_writers(sizes, [[0, 1]] * 3 + [[1]] + [[0, 1]] * 2)
    assert writers == choose_writers(sizes, [[0, 1]] * 3 + [[1]] + [[0, 1]] * 2)
    assert writers[3] == 1
    filled = [sum(s for s, w in zip(sizes, writers) if w == rank) for rank in (0, 1)]
    assert abs(filled[0] - filled[1]) <= 1, filled


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda f: (f / MANIFEST).unlink(), "holds no complete weights"),
        (lambda f: (f / MANIFEST).write_text("{"), "does not read"),
        (lambda f: edit(f, lambda m: m.pop("kind")), "does not read"),
        (lambda f: edit(f, lambda m: m.update(kind="whole")), "does not read: kind 'whole'"),
        (lambda f: edit(f, lambda m: m.update(format_version=9)), "format version 9"),
        (lambda f: edit(f, lambda m: m["files"].update({"../x": {"bytes": 1, "sha256": ""}})), "does not read"),
        (lambda f: next(f.glob("model-*")).unlink(), "is missing"),
        (lambda f: (f / INDEX).write_text("{}"), "bytes instead of"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(tmp_path, spoil, message):
    write(tmp_path / "w")
    spoil(tmp_path / "w")
    with pytest.raises(ValueError, match=message):
        read_manifest(tmp_path / "w")


def edit(folder, change):
    plain = json.loads((folder / MANIFEST).read_text())
    change(plain)
    (folder / MANIFEST).write_text(json.dumps(plain))


def test_a_changed_bit_is_found_in_file_and_tensor(tmp_path):
    manifest = write(tmp_path / "w")
    path = next((tmp_path / "w").glob("model-*"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=path.name):
        check_files(tmp_path / "w", read_manifest(tmp_path / "w"))
    wanted = {name: entry.checksum for name, entry in manifest.tensors.items()}
    with pytest.raises(ValueError, match="the folder: layer...weight is not as written"):
        compare_checksums(wanted, found := checksum_folder(tmp_path / "w"), "the folder")
    with pytest.raises(ValueError, match="are not as written"):
        compare_checksums(wanted | {"extra": ""}, found, "the folder")


def test_a_plain_hugging_face_folder_is_one_too(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert tensor_files(tmp_path) == dict.fromkeys(TENSORS, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="holds no weights"):
        tensor_files(tmp_path / "nowhere")
    write(tmp_path / "w")
    next((tmp_path / "w").glob("model-*")).unlink()
    with pytest.raises(ValueError, match="of its index is missing"):
        tensor_files(tmp_path / "w")


def test_what_another_life_has_left_is_gone(tmp_path):
    write(tmp_path / "w", ranks=2)
    open_folder(tmp_path / "w")
    assert not list((tmp_path / "w").iterdir())


def test_the_way_to_a_version(tmp_path):
    chain = {0: ("full", None), 1: ("delta", 0), 2: ("unchanged", 1), 3: ("full", None), 4: ("delta", 3), 6: ("lora", 0)}
    write_chain(tmp_path, chain)

    def way(held, wanted):
        return [int(path.name.removeprefix("version-")) for path in plan_syncs(tmp_path, held, wanted)]

    assert way([0], 2) == [1, 2] and way([1], 2) == [2] and way([2], 2) == []
    assert way([], 2) == [0, 1, 2] and way([3], 2) == [0, 1, 2]
    assert way([2], 4) == [3, 4] and way([3], 4) == [4]
    assert way([6, 0], 6) == [] and way([5, 0], 6) == [6] and way([], 6) == [0, 6]
    with pytest.raises(ValueError, match="version 5 cannot be had.*no complete weights"):
        plan_syncs(tmp_path, [4], 5)
    shutil.rmtree(version_folder(tmp_path, 0))
    with pytest.raises(ValueError, match="version 2 cannot be had"):
        plan_syncs(tmp_path, [], 2)
    assert sorted(list_versions(tmp_path)) == [1, 2, 3, 4, 6]


def test_a_map_comes_back(tmp_path):
    weights = [
        MappedWeight("qkv", (("q", (8, 4)), ("k", (4, 4)), ("v", (4, 4))), GroupedQKV(4, 2, 2, False)),
        MappedWeight("fc1", (("gate", (6, 4)), ("up", (6, 4))), StackedRows((6, 6))),
    ]
    write_map(tmp_path / "map.json", weights)
    assert read_map(tmp_path / "map.json") == weights
    parts = dict(weights[0].split(draw(16, 4, dtype=torch.float32)))
    assert {name: tuple(t.shape) for name, t in parts.items()} == {"q": (8, 4), "k": (4, 4), "v": (4, 4)}
    for text in ("{}", "nothing", '{"format_version": 1, "weights": [{"name": "x", "sources": [], "layout": {"kind": "?"}}]}'):
        (tmp_path / "map.json").write_text(text)
        with pytest.raises(ValueError, match="is no map of weights"):
            read_map(tmp_path / "map.json")
