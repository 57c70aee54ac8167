"""A rollout store: what is written comes back to the bit, shares cover it, and nothing damaged or half written is read."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rollout_samples import make_group, make_manifest, make_sample

from longstraw.rollout.checks import check_samples
from longstraw.rollout.manifest import StepManifest, explain_difference
from longstraw.rollout.store import SCHEMA, RolloutStore

HERE = Path(__file__).resolve().parent


@pytest.fixture
def written(tmp_path):
    """A store with step 2: groups 0 to 2 and one that was left out; (store, manifest, groups)."""
    groups = [make_group(place, place, routes=place == 1) for place in range(3)] + [make_group(3, None)]
    store = RolloutStore(tmp_path / "store")
    return store, store.write(groups, make_manifest(rows=8)), groups


def test_a_step_comes_back_whole(written):
    store, manifest, groups = written
    assert store.read_manifest(2) == manifest and manifest.bytes > 0 and manifest.checksum.startswith("sha256:")
    assert store.read(manifest) == groups and store.list_steps() == [2]
    assert sorted(path.name for path in store.folder.iterdir()) == ["step-000002.json", "step-000002.parquet"]


def test_any_parquet_reader_finds_the_columns(written):
    table = pq.read_table(written[0].folder / "step-000002.parquet")
    assert table.schema.names == SCHEMA.names and table["step"].to_pylist() == [2] * 8
    assert table["group_index"].to_pylist() == [0, 0, 1, 1, 2, 2, None, None]
    assert table["sample_id"].to_pylist() == [0, 1] * 4 and table["weight_version"].to_pylist() == [1] * 8
    assert [ids is None for ids in table["prompt_token_ids"].to_pylist()] == [False, True] * 4
    assert table["reward_status"].to_pylist() == ["ok", "timeout"] * 4
    assert table["logprobs"].to_pylist()[2] == list(make_sample(10).logprobs)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_shares_cover_the_step_once(written, ranks):
    store, manifest, groups = written
    shares = [store.read(manifest, rank=rank, ranks=ranks) for rank in range(ranks)]
    indices = [[group.group_index for group in share if group.group_index is not None] for share in shares]
    assert indices == [list(range(rank, 3, ranks)) for rank in range(ranks)]
    assert sum(len(share) for share in shares) == len(groups) and groups[3] in shares[0]


def test_a_writer_killed_at_any_moment_leaves_a_whole_step_or_none(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[2])}
    done = subprocess.run(
        [sys.executable, HERE / "killed_writes.py", tmp_path], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0 and "kills" in done.stdout, done.stdout + done.stderr


def spoil_file(store):
    path = store.folder / "step-000002.parquet"
    path.write_bytes(path.read_bytes()[:-1] + b"!")


def spoil_length(store):
    path = store.folder / "step-000002.parquet"
    path.write_bytes(path.read_bytes()[:100])


def change_manifest(**changes):
    def change(store):
        path = store.folder / "step-000002.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


@pytest.mark.parametrize("spoil, sentence", [
    (spoil_file, "is damaged: it is not the file that was written"),
    (spoil_length, "is damaged: it is not the file that was written"),
    (lambda store: (store.folder / "step-000002.parquet").unlink(), "is missing, though its manifest is there"),
    (lambda store: (store.folder / "step-000002.json").unlink(), "holds no rollouts of step 2 (it has none)"),
    (lambda store: (store.folder / "step-000002.json").write_text("{"), "is no manifest of rollouts"),
    (lambda store: (store.folder / "step-000002.json").write_text("[]"), "is no manifest of rollouts"),
    (change_manifest(format_version=1), "has format version 1, and this program reads version 2"),
    (change_manifest(step=3), "is the manifest of step 3"),
    (change_manifest(rows=7), "holds 8 rollouts, not 7"),
    (change_manifest(weight_version=5), "holds rollouts of weight_version 1, and its manifest says 5"),
    (change_manifest(settings=None), "is no manifest of rollouts: settings is None"),
    (change_manifest(surprise=1), "is no manifest of rollouts: it holds"),
])  # fmt: skip
def test_what_is_not_whole_is_refused(written, spoil, sentence):
    store = written[0]
    spoil(store)
    with pytest.raises(ValueError) as refused:
        store.read(store.read_manifest(2))
    assert sentence in str(refused.value) and "\n" not in str(refused.value)


def test_groups_that_are_not_the_manifests_are_not_written(tmp_path):
    store = RolloutStore(tmp_path)
    for groups, manifest in (
        ([make_group(0, 0)], make_manifest(groups=2, rows=2)), ([make_group(0, 0)], make_manifest(groups=1, rows=3)),
        ([make_group(0, 0), make_group(1, 0)], make_manifest(groups=2, rows=4)),
    ):
        with pytest.raises(ValueError, match="are not the manifest's"):
            store.write(groups, manifest)
    assert list(tmp_path.iterdir()) == []


def test_a_message_that_is_no_text_is_stored_written_out(tmp_path):
    group = dataclasses.replace(make_group(0, 0), messages=("", "no \udcff"))
    store = RolloutStore(tmp_path)
    manifest = store.write([group], make_manifest(groups=1, rows=2))
    assert [found.messages for found in store.read(manifest)] == [("", "no \\udcff")]


def test_later_steps_are_dropped(written):
    store = written[0]
    for step in (3, 4):
        store.write([make_group(0, 0, version=step - 1)], make_manifest(step, groups=1, rows=2))
    store.drop_after(3)
    assert store.list_steps() == [2, 3] and not (store.folder / "step-000004.parquet").exists()
    store.drop_after(9)
    assert store.list_steps() == [2, 3]


def test_differences_name_the_flag():
    manifest = make_manifest(settings={"sampling_temperature": 0.7, "tokenizer_path": "abc"})
    assert explain_difference(manifest, dict(manifest.settings)) == ""
    warm = {"sampling_temperature": 1.0, "tokenizer_path": "abc"}
    assert explain_difference(manifest, warm) == (
        "sampled with --sampling-temperature 0.7, unlike this run's --sampling-temperature 1.0"
    )
    other = {"sampling_temperature": 0.7, "tokenizer_path": "abd"}
    assert explain_difference(manifest, other) == "sampled with another tokenizer, unlike this run's --tokenizer-path"
    assert "--sampling-top-p None" in explain_difference(manifest, dict(manifest.settings) | {"sampling_top_p": 1.0})


def test_a_manifest_survives_json():
    manifest = make_manifest(bytes=5, checksum="sha256:0")
    assert StepManifest.from_json(manifest.to_json()) == manifest


ASKED = dict(group_size=2, weight_version=1, max_response_length=3, stop_ids=frozenset({6}), num_tokens=50)


@pytest.mark.parametrize("change, clause", [
    (dict(weight_version=0), "response 1 was sampled by weights of version 0, and version 1 is needed"),
    (dict(token_ids=()), "response 1 has 0 tokens, not 1 to 3"),
    (dict(token_ids=(1, 2, 3, 4)), "response 1 has 4 tokens, not 1 to 3 (--max-response-length)"),
    (dict(token_ids=(5, 50)), "response 1 holds token 50, outside the tokenizer's 50"),
    (dict(token_ids=(5, -1)), "response 1 holds token -1"),
    (dict(logprobs=(-0.5,)), "response 1 has 2 tokens and 1 log-probabilities"),
    (dict(logprobs=(-0.5, float("nan"))), "response 1 has nan as a token's log-probability"),
    (dict(logprobs=(-0.5, float("-inf"))), "response 1 has -inf as a token's log-probability"),
    (dict(logprobs=(-0.5, 0.2)), "response 1 has 0.2 as a token's log-probability"),
    (dict(token_ids=(6, 6)), "response 1 goes on behind a stop token"),
    (dict(finish_reason="length"), "response 1 ends with token 6 and is said to have ended by length"),
    (dict(token_ids=(5, 7), finish_reason="length"), "response 1 was cut after 2 tokens, short of --max-response-length 3: the "
     "engine's --max-model-len"),
    (dict(token_ids=(5, 7)), "response 1 ends with token 7 and is said to have ended by stop"),
])  # fmt: skip
def test_a_sample_that_was_not_asked_for_is_named(change, clause):
    good = [make_sample(0, 3), make_sample(5, 2)]
    assert check_samples(good, **ASKED) == ""
    assert check_samples([good[0], dataclasses.replace(good[1], **change)], **ASKED).startswith(clause)
    assert check_samples(good[:1], **ASKED) == "1 responses came back where 2 were asked for"
