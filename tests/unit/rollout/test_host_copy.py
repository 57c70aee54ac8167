"""The host copy that updates are made on: what it serves has the trainer's bits, and files that vanish with it."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from longstraw.optim.masters import split_float32
from longstraw.optim.projection import Projection
from longstraw.optim.sketch import BlockLimits
from longstraw.optim.update import apply_update
from longstraw.receipts.collect import checksum_tensors
from longstraw.rollout.host_copy import HostCopy
from longstraw.rollout.row_layouts import GroupedQKV, StackedRows
from longstraw.rollout.weight_delta import DeltaManifest, WeightStep, checksum_weights, write_delta
from longstraw.rollout.weight_folder import DELTA_FILE, FolderManifest, TensorEntry, write_manifest
from longstraw.rollout.weight_map import MappedWeight
from tests.support.sketches import draw

F32 = torch.float32
MAP = [
    MappedWeight("qkv", (("q", (16, 12)), ("k", (8, 12)), ("v", (8, 12))), GroupedQKV(4, 2, 4, False)),
    MappedWeight("out", (("o", (12, 16)),), StackedRows((12,))),
]
RANK, LIMITS = 3, BlockLimits(entries=24)


def start(folder, dtype=F32):
    """A checkpoint -> its tensors."""
    shapes = {name: shape for weight in MAP for name, shape in weight.sources} | {"norm": (12,)}
    tensors = {n: draw(*s, seed=i, dtype=F32).to(dtype) for i, (n, s) in enumerate(shapes.items())}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return tensors


def merge(tensors):
    return {w.name: w.layout.merge([tensors[n].float() for n, _ in w.sources]).clone() for w in MAP}


def step(folder, weights, number, *, norm=None):
    """An update of float32 weights, in place, and its folder."""
    folder.mkdir()
    base, entries = checksum_weights(weights.items()), {}
    for name, weight in weights.items():
        entries[name] = draw(len(weight), RANK, seed=10 * number, dtype=F32)
        drawn = Projection(name=name, rank=RANK, columns=weight.shape[1], seed=7, draw=number, kind="rademacher")
        apply_update(weight, entries[name], drawn, 0.01, rows_at_once=4, limits=LIMITS)
    write_delta(folder / DELTA_FILE, entries, DeltaManifest(
        step=number, base=base, result=checksum_weights(weights.items()), rank=RANK, kind="rademacher", seed=7, draw=number,
        entries_at_once=LIMITS.entries, rows_at_once=4,
        weights={n: WeightStep(columns=w.shape[1], step=0.01) for n, w in weights.items()},
    ))
    whole = {}
    if norm is not None:
        save_file({"norm": norm}, folder / "rest.safetensors")
        whole = {"norm": TensorEntry("rest.safetensors", checksum_tensors([("norm", norm)]))}
    write_manifest(folder, FolderManifest(kind="delta", version=number, base_version=number - 1, tensors=whole))


def served(copy):
    """(what an engine loads, the paths that it loads from)."""
    with copy.serve() as sources:
        loaded = [(load_file(path), names) for path, names in sources]
        assert all(Path(path).exists() for path, _ in sources)
    return {n: t for tensors, names in loaded for n, t in tensors.items() if names is None or n in names}, sources


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_updates_one_after_another(tmp_path, dtype):
    tensors = start(tmp_path / "0", getattr(torch, dtype))
    weights = merge(tensors)
    copy = HostCopy.open(tmp_path / "0", MAP, dtype)
    for number in (1, 2, 3):
        norm = draw(12, seed=90 + number, dtype=F32) if number == 2 else None
        step(tmp_path / str(number), weights, number, norm=norm)
        copy.apply(tmp_path / str(number))
        found, sources = served(copy)
        for weight in MAP:
            whole = weights[weight.name] if dtype == "float32" else split_float32(weights[weight.name])[0]
            assert all(torch.equal(found[name], part) for name, part in weight.split(whole))
        assert torch.equal(found["norm"], norm if number == 2 else tensors["norm"] if number == 1 else found["norm"])
        assert copy.checksums == {n: checksum_tensors([(n, t)]) for n, t in found.items() if n != "norm"}
        own = [path for path, _ in sources if path.startswith(f"/proc/{os.getpid()}/fd/")]
        assert own and not any(Path(path).exists() and "longstraw" in os.readlink(path) for path in own), "files stay"
    assert not torch.equal(found["q"], tensors["q"])


def test_another_base_and_damage_change_nothing(tmp_path):
    weights = merge(start(tmp_path / "0"))
    for number in (1, 2):
        step(tmp_path / str(number), weights, number)
    copy = HostCopy.open(tmp_path / "0", MAP, "float32")
    before, _ = served(copy)
    with pytest.raises(ValueError, match="is the update of step 2 to weights with checksum"):
        copy.apply(tmp_path / "2")
    content = bytearray((tmp_path / "1" / DELTA_FILE).read_bytes())
    content[-1] ^= 1
    (tmp_path / "1" / DELTA_FILE).write_bytes(content)
    with pytest.raises(ValueError, match="is damaged"):
        copy.apply(tmp_path / "1")
    after, _ = served(copy)
    assert all(torch.equal(after[n], t) for n, t in before.items())


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path):
    start(tmp_path / "0")
    with pytest.raises(ValueError, match="float32 or bfloat16, not float16"):
        HostCopy.open(tmp_path / "0", MAP, "float16")
    with pytest.raises(ValueError, match="has no z, which updates move"):
        HostCopy.open(tmp_path / "0", [MappedWeight("z", (("z", (2, 2)),), StackedRows((2,)))], "float32")
    with pytest.raises(ValueError, match=r"has o as torch.float32 \[12, 16\], and updates move \[16, 12\]"):
        HostCopy.open(tmp_path / "0", [MappedWeight("out", (("o", (16, 12)),), StackedRows((16,)))], "float32")
