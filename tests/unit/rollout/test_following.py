"""An engine on its way through a trainer's weight versions: the server's weights and socket, and the client that follows."""

import json
import sys
import threading

import pytest
from safetensors import safe_open
from test_host_copy import MAP, merge, start, step

from longstraw.receipts.collect import checksum_tensors
from longstraw.rollout.host_copy import HostCopy
from longstraw.rollout.vllm_client import catch_up
from longstraw.rollout.vllm_client.engine import VllmEngine
from longstraw.rollout.vllm_server.service import Service
from longstraw.rollout.vllm_server.weights import HeldWeights, read_start
from longstraw.rollout.weight_export import open_folder
from longstraw.rollout.weight_folder import (
    DELTA_FILE, MAP_FILE, FolderManifest, TensorEntry, hash_file, read_manifest, version_folder, write_manifest,
)
from longstraw.rollout.weight_map import write_map


class Ranks:
    """Stands where vLLM's workers are: loads tensors by name, and says their checksums."""

    def __init__(self):
        self.tensors = {}

    def load(self, sources):
        self.tensors = {}
        for path, names in sources:
            with safe_open(path, framework="pt") as file:
                self.tensors |= {name: file.get_tensor(name).clone() for name in (names or file.keys())}
        return {name: checksum_tensors([(name, tensor)]) for name, tensor in self.tensors.items()}

    def reset_prefix_cache(self):
        return True


class Server:
    """An engine without a model behind the real socket."""

    def __init__(self, folder):
        version, checksums, lineage = read_start(str(folder), 0)
        self.ranks = Ranks()
        self.weights = HeldWeights(
            self.ranks, self.ranks.load, dtype="float32", max_lora_rank=0, folder=str(folder), version=version,
            checksums=checksums, lineage=lineage,
        )

    def status(self):
        return self.weights.describe()

    def sync(self, path, version):
        return self.weights.sync(path, version)


def connect(engine):
    service = Service("127.0.0.1", "token", end=lambda: None)
    threading.Thread(target=service.accept, daemon=True).start()
    threading.Thread(target=service.run, args=(engine,), daemon=True).start()
    return {"host": "127.0.0.1", "port": service.port, "token": "token", "pid": 1, "weight_version": 0}


def write_full(root, number, lineage):
    """A whole version -> the trainer's float32 matrices."""
    folder = version_folder(root, number)
    tensors = start(folder)
    path = folder / "model.safetensors"
    write_manifest(folder, FolderManifest(
        kind="full", version=number, lineage=lineage, files={path.name: hash_file(path)},
        tensors={n: TensorEntry(path.name, checksum_tensors([(n, t)])) for n, t in tensors.items()},
    ))
    return merge(tensors)


def write_unchanged(root, number, lineage):
    open_folder(version_folder(root, number))
    write_manifest(version_folder(root, number), FolderManifest(
        kind="unchanged", version=number, base_version=number - 1, lineage=lineage
    ))


def write_update(root, number, weights, lineage):
    folder = version_folder(root, number)
    step(folder, weights, number)
    write_map(folder / MAP_FILE, MAP)
    write_manifest(folder, FolderManifest(
        kind="delta", version=number, base_version=number - 1, lineage=lineage,
        files={name: hash_file(folder / name) for name in (DELTA_FILE, MAP_FILE)},
    ))


@pytest.fixture
def root(tmp_path):
    """Whole weights, a step that left them alone, and two updates."""
    weights = write_full(tmp_path, 0, "a0")
    write_unchanged(tmp_path, 1, "a1")
    for number in (2, 3):
        write_update(tmp_path, number, weights, f"a{number}")
    return tmp_path


@pytest.mark.parametrize("stops", [(0, 1, 2, 3), (2, 3), (3,)])
def test_an_update_of_weights_that_a_step_left_alone(root, stops):
    """In a run that goes on, and in an engine that starts from the folder of the whole weights."""
    server = Server(version_folder(root, 0))
    engine = VllmEngine(connect(server))
    for version in stops:
        engine.follow(root, version)
        assert (engine.weight_version, engine.lineage) == (version, f"a{version}")
    copy = HostCopy.open(version_folder(root, 0), MAP, "float32")
    for number in (2, 3):
        copy.apply(version_folder(root, number))
    with copy.serve() as sources:
        assert Ranks().load(sources) == server.weights.checksums()
    with pytest.raises(ValueError, match="builds on version 1, and the engine holds version 3"):
        engine.sync(version_folder(root, 2), 2)


def test_the_same_number_of_another_run_is_replaced(root, tmp_path):
    """Whole weights by whole ones, and an update never builds on another run's."""
    other = tmp_path / "other"
    write_full(other.mkdir() or other, 0, "b0")
    engine = VllmEngine(connect(Server(version_folder(other, 0))))
    assert (engine.weight_version, engine.lineage) == (0, "b0")
    assert [done.kind for done in engine.follow(root, 0)] == ["full"] and engine.lineage == "a0"
    assert engine.follow(root, 0) == []
    engine.follow(other, 0)
    assert [done.kind for done in engine.follow(root, 2)] == ["full", "unchanged", "delta"] and engine.lineage == "a2"


def test_a_start_without_a_manifest_is_of_nobody_knows_which_run(root, tmp_path):
    plain = tmp_path / "plain"
    start(plain)
    engine = VllmEngine(connect(Server(plain)))
    assert (engine.weight_version, engine.lineage) == (0, None)
    assert [done.kind for done in engine.follow(root, 1)] == ["full", "unchanged"]


class WithAnAdapter:
    """What an engine says that serves an adapter of version 3 on the weights of version 0."""

    version = 3

    def status(self):
        return {"weight_version": self.version, "builds_on": [self.version, 0]}

    def sync(self, path, version):
        self.version = version
        return {"kind": read_manifest(path).kind, "bytes": 0, "seconds": 0.0}


class Deaf(WithAnAdapter):
    """Takes nothing, and says it did."""

    def sync(self, path, version):
        return {"kind": "full", "bytes": 0, "seconds": 0.0}


def test_an_adapter_is_left_for_the_weights_under_it(tmp_path, monkeypatch, capsys):
    open_folder(version_folder(tmp_path, 0))
    write_manifest(version_folder(tmp_path, 0), FolderManifest(kind="full", version=0))
    engine = VllmEngine(connect(WithAnAdapter()))
    assert [done.kind for done in engine.follow(tmp_path, 0)] == ["full"] and engine.weight_version == 0
    for server, status in ((WithAnAdapter(), 0), (Deaf(), 1)):
        ready = tmp_path / "ready.json"
        ready.write_text(json.dumps(connect(server)))
        flags = ["--ready-file", str(ready), "--weight-sync-dir", str(tmp_path), "--version", "0"]
        monkeypatch.setattr(sys, "argv", ["catch_up", *flags])
        assert catch_up.main() == status
    assert "the server holds version 3, not 0" in capsys.readouterr().err
