"""A receipt survives the disk unchanged, cannot state nonsense, and its schema file is the one its types give."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch
from receipt_samples import make_receipt

from longstraw.receipts.collect import checksum_tensors, collect_versions, join_checksums, now_utc, summarize_state
from longstraw.receipts.receipt import RankMemory, Receipt, Results, Staleness, Tokens, Topology, read_receipt, write_receipt
from longstraw.receipts.schema import SCHEMA_PATH, build_schema, read_field_notes, validate


def test_a_receipt_survives_the_disk(tmp_path):
    written = make_receipt(semantics="stale_prefix", staleness=Staleness(prefix_age_steps=2))
    write_receipt(tmp_path / "run/receipt.json", written)
    assert read_receipt(tmp_path / "run/receipt.json") == written
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["receipt.json"]


def test_only_rank_0_writes(tmp_path):
    write_receipt(tmp_path / "run/receipt.json", make_receipt(), rank=1)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_receipt(tmp_path, monkeypatch):
    path = tmp_path / "receipt.json"
    write_receipt(path, make_receipt(seed=1))

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr("longstraw.receipts.receipt.os.fsync", fail)
    with pytest.raises(OSError):
        write_receipt(path, make_receipt(seed=2))
    assert read_receipt(path).seed == 1


def test_the_schema_file_is_up_to_date():
    assert json.loads(SCHEMA_PATH.read_text()) == build_schema(Receipt), "run: python -m longstraw.receipts.schema"


@pytest.mark.parametrize("spoil, message", [
    (lambda r: r.pop("semantics"), "the document lacks semantics"),
    (lambda r: r.update(semantics="mostly"), "semantics is 'mostly', not one of 'exact'"),
    (lambda r: r.update(schema_version=1), "schema_version is 1, not 3"),
    (lambda r: r.update(surprise=1), "the document has surprise"),
    (lambda r: r["memory"][1].update(peak_bytes="much"), r"memory\[1\].peak_bytes is 'much'"),
    (lambda r: r["memory"][0]["categories"].update(graph=1.5), r"memory\[0\].categories.graph"),
    (lambda r: r["topology"].update(sequence_parallel=1), "topology.sequence_parallel is 1, not of type boolean"),
    (lambda r: r.update(seed=True), "seed is True, not of type integer"),
    (lambda r: r["metrics"].update(kl=10**400), "metrics.kl is 1000"),
    (lambda r: r["seconds"].update(replay=float("nan")), "seconds.replay is nan"),
    (lambda r: r["objective"].update(group_size=[8]), "objective.group_size"),
    (lambda r: r["state"][0].update(residency="disk"), r"state\[0\].residency is 'disk'"),
])
def test_a_document_that_is_no_receipt_is_refused(spoil, message):
    document = make_receipt().to_json()
    spoil(document)
    with pytest.raises(ValueError, match=message):
        Receipt.from_json(document)


@pytest.mark.parametrize("build, message", [
    (lambda: make_receipt(staleness=Staleness(prefix_age_steps=1)), "semantics exact cannot have a prompt state 1 steps old"),
    (lambda: make_receipt(memory=make_receipt().memory[:1]), r"memory is given for ranks \[0\] of 2"),
    (lambda: make_receipt(state=(replace(make_receipt().state[0], rank=5),)), r"state is given for ranks \[5\]"),
    (lambda: make_receipt(source="dry_run", state=(), memory=(replace(make_receipt().memory[0], rank=2),)), r"ranks \[2\] of 2"),
    (lambda: RankMemory(rank=0, peak_bytes=10, categories={}, host_bytes=3, host_categories={"a": 4}), "host categories sum to 4"),
    (lambda: make_receipt(finished="2026-01-02T03:04:04+00:00"), "this order"),
    (lambda: make_receipt(started="2026-01-02T03:04:05"), "time zone"),
    (lambda: make_receipt(seconds={"replay": -1.0}), r"seconds\['replay'\] is -1.0"),
    (lambda: make_receipt(seconds={"replay": float("nan")}), r"seconds\['replay'\] is nan"),
    (lambda: make_receipt(seed="7"), "seed is '7'"),
    (lambda: RankMemory(rank=0, peak_bytes=10, categories={"a": 6, "b": 5}), "sum to 11 bytes, more than its peak of 10"),
    (lambda: Tokens(prompts=1, responses=1, prompt_tokens=1, response_tokens=2, loss_tokens=3), "3 loss tokens are more"),
    (lambda: Results(first_step=5, last_step=3, first_eval_reward_mean=None, last_eval_reward_mean=None), "steps 5 to 3"),
    (lambda: Topology(world_size=4, tensor_model_parallel_size=1, context_parallel_size=2, data_parallel_size=1,
                      backend="gloo", device="cpu"), "tensor 1 x context 2 x data 1 parallel is not the world size 4"),
])
def test_nonsense_cannot_be_stated(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_schema_with_a_keyword_the_validator_does_not_know_is_an_error():
    with pytest.raises(ValueError, match="minimum"):
        validate(1, {"type": "integer", "minimum": 5})


def test_a_field_without_a_docstring_is_refused():
    @dataclass
    class Silent:
        value: int

    with pytest.raises(ValueError, match="Silent.value has no docstring"):
        read_field_notes(Silent)


@dataclass
class Entry:
    owner: int
    kind: str
    residency: str
    layer_number: int
    rows: int
    bytes: int


def test_ledger_entries_are_summed_by_owner_class_and_residency():
    entries = [Entry(1, "kv_pages", "host", 4, 10, 100), Entry(1, "kv_pages", "host", 8, 10, 100),
               Entry(1, "kv_pages", "host", 8, 5, 50), Entry(1, "kv_pages", "device", 4, 1, 7),
               Entry(0, "recurrent_state", "device", 1, 0, 64)]
    found = [(s.rank, s.owner, s.kind, s.residency, s.layers, s.rows, s.bytes) for s in summarize_state(3, entries)]
    assert found == [(3, 0, "recurrent_state", "device", 1, 0, 64), (3, 1, "kv_pages", "device", 1, 1, 7),
                     (3, 1, "kv_pages", "host", 2, 25, 250)]


def test_a_checksum_sees_every_bit_and_no_order():
    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.tensor(1.0)}
    whole = checksum_tensors(weights.items())
    assert whole == checksum_tensors(reversed(list(weights.items())))
    assert whole == checksum_tensors({**weights, "a": weights["a"].T.contiguous().T}.items()), "strides are no content"
    for changed in ({"a": weights["a"].reshape(3, 2)}, {"b": weights["b"].float()}, {"c": -weights["c"]},
                    {"a": torch.nextafter(weights["a"], torch.tensor(9.0))}):
        assert whole != checksum_tensors({**weights, **changed}.items())
    assert join_checksums(["x", "y"]) != join_checksums(["y", "x"])


def test_versions_and_times_are_those_of_a_receipt():
    versions = collect_versions()
    assert versions.torch.split("+")[0] == torch.__version__.split("+")[0] and versions.megatron_core.startswith("0.19")
    make_receipt(versions=versions, finished=now_utc())


def test_receipts_need_no_megatron_and_no_torch():
    program = ("import sys, longstraw.receipts.recorder, longstraw.receipts.collect\n"
               "sys.exit(str([name for name in sys.modules if name.split('.')[0] in ('megatron', 'torch', 'matplotlib')]) "
               "if {'megatron', 'torch'} & set(sys.modules) else 0)")
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
