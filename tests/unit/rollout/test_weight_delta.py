"""An update as a file: the receiver's weights are the trainer's bit for bit; what does not fit is refused, unchanged."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from longstraw.optim.master_rows import MasterRows
from longstraw.optim.masters import join_float32, split_float32
from longstraw.optim.projection import Projection
from longstraw.optim.sketch import BlockLimits, open_sketch
from longstraw.optim.update import apply_update
from longstraw.optim.updated_weight import ROWS_AT_ONCE, Placement, UpdatedWeight
from longstraw.rollout.weight_delta import (
    DeltaManifest, WeightStep, apply_delta, checksum_weights, measure_delta, read_manifest, round_as_trainer,
    scale_rows, write_delta,
)
from tests.support.sketches import draw

F32 = torch.float32
SHAPES = {"decoder.layers.0.fc1.weight": (37, 200), "one.row": (1, 64), "odd": (9, 131)}
RANK, ROWS, ENTRIES = 5, 4, 5 * 64  # tiles of 4 x 64: several a weight, and a rest


def start(seed=0):
    return {name: draw(*shape, seed=seed + i, dtype=F32) for i, (name, shape) in enumerate(SHAPES.items())}


def sketches(step):
    """Sketches that are views of one buffer, as a trainer may hold them."""
    flat = draw(sum(d for d, _ in SHAPES.values()), RANK, seed=100 + step, dtype=F32)
    return dict(zip(SHAPES, flat.split([d for d, _ in SHAPES.values()])))


class Trainer:
    """Takes steps as an optimizer does, on float32 weights or on bfloat16 with remainders, and writes each."""

    def __init__(self, weights, *, bfloat16=False, kind="rademacher"):
        self.kind, self.bfloat16, self.number = kind, bfloat16, 0
        self.weights = {name: split_float32(w) if bfloat16 else (w.clone(), None) for name, w in weights.items()}

    def masters(self):
        return {n: join_float32(w, r) if self.bfloat16 else w for n, (w, r) in self.weights.items()}

    def step(self, path):
        self.number += 1
        base, entries, steps = checksum_weights(self.masters().items()), {}, {}
        for name, sketch in sketches(self.number).items():
            weight, remainder = self.weights[name]
            row_scale = draw(len(sketch), seed=self.number, dtype=F32).exp() if self.number % 2 else None
            steps[name] = WeightStep(columns=weight.shape[1], step=0.1 / 3 / self.number * len(name))
            drawn = Projection(
                name=name, rank=RANK, columns=weight.shape[1], seed=7, draw=self.number, kind=self.kind
            )
            apply_update(
                weight, sketch, drawn, steps[name].step, row_scale=row_scale, remainder=remainder, rows_at_once=ROWS,
                limits=BlockLimits(entries=ENTRIES),
            )  # fmt: skip
            entries[name] = scale_rows(sketch, row_scale)
        manifest = DeltaManifest(
            step=self.number, base=base, result=checksum_weights(self.masters().items()), rank=RANK, kind=self.kind,
            seed=7, draw=self.number, entries_at_once=ENTRIES, rows_at_once=ROWS, weights=steps,
        )  # fmt: skip
        return write_delta(path, entries, manifest), manifest


def same(found, wanted):
    return found.keys() == wanted.keys() and all(torch.equal(found[n], w) for n, w in wanted.items())


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_a_float32_receiver_has_the_trainers_bits(kind, tmp_path):
    trainer, copies = Trainer(start(), kind=kind), start()
    for number in (1, 2, 3):
        _, manifest = trainer.step(tmp_path / "delta")
        assert read_manifest(tmp_path / "delta") == replace(manifest, payload=read_manifest(tmp_path / "delta").payload)
        before = {n: w.clone() for n, w in copies.items()}
        apply_delta(tmp_path / "delta", copies)
        assert same(copies, trainer.masters()) and not same(copies, before)
    assert [p.name for p in tmp_path.iterdir()] == ["delta"]


def test_a_bfloat16_receiver_has_the_trainers_bits(tmp_path):
    """Its float32 copies begin as the bfloat16 weights; a weight half-way between two is where a cast would differ."""
    begun = {name: w.bfloat16().float() for name, w in start().items()}
    trainer, copies = Trainer(begun, bfloat16=True), {n: w.clone() for n, w in begun.items()}
    for _ in range(3):
        trainer.step(tmp_path / "delta")
        apply_delta(tmp_path / "delta", copies)
        served = {name: round_as_trainer(copy) for name, copy in copies.items()}
        assert same(served, {name: w for name, (w, _) in trainer.weights.items()})
        assert same(copies, trainer.masters())
    tie = torch.tensor([1 + 2.0**-8])
    assert round_as_trainer(tie).item() == 1 + 2.0**-7 and tie.bfloat16().item() == 1.0


@pytest.mark.parametrize("masters", [None, "float32", "remainder"])
def test_the_optimizers_own_step_is_followed(masters, tmp_path):
    """RowAdam on a weight of more rows than a tile: float32, and bfloat16 with either kind of masters."""
    begun = draw(ROWS_AT_ONCE + 300, 70, dtype=F32).bfloat16()
    weight = torch.nn.Parameter(begun.float() if masters is None else begun.clone(), requires_grad=False)
    drawn = Projection(name="w", rank=RANK, columns=70, seed=3, draw=0)
    kept = None if masters is None else MasterRows(weight.data, kind=masters, residency="device")
    updated = UpdatedWeight(
        name="w", weight=weight, placement=Placement(columns=70), rule="rowadam", sketch=open_sketch(weight, drawn),
        masters=kept,
    )  # fmt: skip
    full = lambda: weight.data if kept is None else kept.whole(weight.data)  # noqa: E731
    copies = {"w": begun.float()}
    for number in (1, 2):
        updated.sketch.restart(number)
        updated.sketch.sketch.copy_(draw(len(begun), RANK, seed=number, dtype=F32))
        updated.prepare(number)
        base, factors = checksum_weights([("w", full())]), updated.factors()
        updated.apply(0.3 / number)
        manifest = DeltaManifest(
            step=number, base=base, result=checksum_weights([("w", full())]), rank=RANK, kind="rademacher", seed=3,
            draw=number, entries_at_once=updated.sketch.limits.entries, rows_at_once=ROWS_AT_ONCE,
            weights={"w": WeightStep(columns=70, step=0.3 / number)},
        )  # fmt: skip
        write_delta(tmp_path / "delta", {"w": factors}, manifest)
        apply_delta(tmp_path / "delta", copies)
        assert torch.equal(copies["w"], full())
        served = copies["w"] if masters is None else round_as_trainer(copies["w"])
        assert torch.equal(served, weight.data)


def test_steps_come_back_to_the_last_bit(tmp_path):
    write, manifest = Trainer(start()).step(tmp_path / "delta")
    found = read_manifest(tmp_path / "delta").weights
    assert found == manifest.weights and all(0.1 / 3 * len(n) == w.step for n, w in found.items())
    size = measure_delta(tmp_path / "delta", bytes_per_weight=4)
    assert size.payload == write == (tmp_path / "delta").stat().st_size
    assert size.weights == sum(4 * d * k for d, k in SHAPES.values())
    numbers = 4 * RANK * sum(d for d, _ in SHAPES.values())
    assert numbers < size.payload < numbers + 2500  # U, and a header


@pytest.fixture
def delta(tmp_path):
    Trainer(start()).step(tmp_path / "delta")
    return tmp_path / "delta"


def refused(path, weights, words):
    """apply_delta says these words in one sentence and leaves the weights alone."""
    before = {name: w.clone() for name, w in weights.items()}
    with pytest.raises(ValueError, match=words) as caught:
        apply_delta(path, weights)
    assert "\n" not in str(caught.value)
    assert same(weights, before)


def rewrite(path, change):
    """The same tensors under a changed manifest."""
    with safe_open(path, framework="pt") as file:
        (key, text), = file.metadata().items()
    plain = json.loads(text)
    change(plain)
    save_file(load_file(path), path, metadata={key: json.dumps(plain)})


def test_another_base_and_a_second_time_are_refused(delta):
    other = start()
    other["odd"][3, 5] = torch.nextafter(other["odd"][3, 5], torch.tensor(9.0))
    refused(delta, other, "the update of step 1 to weights with checksum sha256:")
    weights = start()
    apply_delta(delta, weights)
    refused(delta, weights, "they hold it already")


@pytest.mark.parametrize("change, words", [
    (lambda w: w.pop("odd"), "the weights lack odd, unlike"),
    (lambda w: w.update(more=torch.zeros(2, 2)), "the weights have more, unlike"),
    (lambda w: w.update(odd=torch.zeros(9, 130)), r"odd as float32 \[9, 131\], which is torch.float32 \[9, 130\]"),
    (lambda w: w.update(odd=torch.zeros(8, 131)), r"which is torch.float32 \[8, 131\]"),
    (lambda w: w.update(odd=torch.zeros(9 * 131)), r"which is torch.float32 \[1179\]"),
    (lambda w: w.update(odd=w["odd"].bfloat16()), "which is torch.bfloat16"),
])
def test_weights_that_do_not_fit_are_refused(delta, change, words):
    weights = start()
    change(weights)
    refused(delta, weights, words)


@pytest.mark.parametrize("change, words", [
    (lambda m: m.update(format_version=2), "format version 2, and this program reads version 1"),
    (lambda m: m.pop("format_version"), "its manifest does not read"),
    (lambda m: m.pop("seed"), "its manifest does not read"),
    (lambda m: m.update(unheard=1), "its manifest does not read"),
    (lambda m: m["weights"]["odd"].update(step="fast"), "its manifest does not read"),
    (lambda m: m.update(weights=3), "its manifest does not read"),
    (lambda m: m["weights"].pop("odd"), "the weights have odd, unlike"),
    (lambda m: m.update(rank=4), "moves"),
])
def test_a_manifest_that_does_not_fit_is_refused(delta, change, words):
    rewrite(delta, change)
    refused(delta, start(), words)


@pytest.mark.parametrize("length", [0, 5, 300, -1])
def test_a_file_cut_short_is_refused(delta, length):
    delta.write_bytes(delta.read_bytes()[:length])
    refused(delta, start(), "cut short or no safetensors file")


def test_a_damaged_missing_or_foreign_file_is_refused(delta, tmp_path):
    whole = bytearray(delta.read_bytes())
    whole[-3] ^= 1
    delta.write_bytes(whole)
    refused(delta, start(), "is damaged: its tensors are not those that were written")
    refused(tmp_path / "nowhere", start(), "no such weight delta")
    save_file({"odd": torch.zeros(2)}, tmp_path / "foreign")
    refused(tmp_path / "foreign", start(), "is no weight delta: its metadata has no")


def test_other_bits_than_the_trainers_are_reported(delta):
    """As on a device whose products round otherwise: here the manifest's tiles are not the trainer's result."""
    rewrite(delta, lambda m: m.update(result="sha256:0"))
    with pytest.raises(ValueError, match="was applied, but the weights differ from the trainer's in the last bits"):
        apply_delta(delta, start())


@pytest.mark.parametrize("change, words", [
    (dict(odd=torch.zeros(9, 4)), r"U of odd must be float32 \[d, 5\], got torch.float32 \[9, 4\]"),
    (dict(odd=torch.zeros(9, 5).double()), "got torch.float64"),
    (dict(odd=torch.full((9, 5), torch.nan)), "the update of odd is not finite"),
    (dict(more=torch.zeros(9, 5)), "the tensors of the update have more, unlike its manifest"),
])
def test_an_update_that_cannot_be_written_leaves_no_file(change, words, tmp_path):
    _, manifest = Trainer(start()).step(tmp_path / "delta")
    before = (tmp_path / "delta").read_bytes()
    with pytest.raises(ValueError, match=words):
        write_delta(tmp_path / "delta", sketches(1) | change, manifest)
    with pytest.raises(ValueError, match="--logra-rank 5 is above the 3 input columns of odd"):
        narrow = manifest.weights | {"odd": WeightStep(columns=3, step=1.0)}
        write_delta(tmp_path / "delta", sketches(1), replace(manifest, weights=narrow))
    assert (tmp_path / "delta").read_bytes() == before and len(list(tmp_path.iterdir())) == 1
