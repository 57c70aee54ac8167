"""Which steps of a store a run may train on, and groups on their way in and out of it."""

from array import array
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from longstraw.rollout.manifest import StepManifest
from longstraw.rollout.protocol import Sample
from longstraw.rollout.store import RolloutStore, StoredGroup
from megatron.grpo.arguments import Machine, parse_arguments
from megatron.grpo.prompt_order import PromptOrder
from megatron.grpo.receipt_settings import describe_responses
from megatron.grpo.rollout_record import describe_rollouts
from megatron.grpo.stored_rollouts import check_step, describe_sampling, pack, unpack

BASE = "--model-preset tiny-qwen3.6 --prompt-data data.jsonl --tokenizer-path tok --train-iters 10 --output-dir out"
WORDS = ("a", "b", "c", "<end>")


def describe(flags: str = "", *, words=WORDS, stop_ids=(3,)) -> dict:
    args, config = parse_arguments(f"{BASE} {flags}".split(), Machine(cuda=False, fused_adam=False, world_size=1))
    vocabulary = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, eos_token="<end>")
    return describe_sampling(args, config, SimpleNamespace(tokenizer=tokenizer, stop_ids=frozenset(stop_ids)))


def make_group(index: int | None = 0, version: int = 2) -> StoredGroup:
    samples = tuple(
        Sample(prompt_id="p", token_ids=(place, 3), logprobs=(-0.25, -1.5), finish_reason="stop", weight_version=version)
        for place in range(2)
    )
    return StoredGroup(
        prompt_id="p", prompt_token_ids=array("i", [1, 2, 0]), samples=samples, rewards=(0.5, 0.0),
        statuses=("ok", "timeout"), messages=("", "killed"), kept=(True, False), group_index=index, attempt=1, place=4,
    )


@pytest.fixture
def order():
    order = PromptOrder(9, seed=1, fingerprint="f")
    order.take(4)
    return order


@pytest.fixture
def stored(tmp_path, order):
    """A store with step 3, which begins where the order stands; called with changes to the manifest."""

    def write(**changes) -> RolloutStore:
        after = order.state_dict() | {"position": 5}
        manifest = StepManifest(**{
            "step": 3, "weight_version": 2, "source": "vllm", "settings": describe(), "data_before": order.state_dict(),
            "data_after": after, "groups": 1, "rows": 2, **changes,
        })  # fmt: skip
        store = RolloutStore(tmp_path)
        store.write([make_group(version=manifest.weight_version)], manifest)
        return store

    return write


def test_a_step_of_this_run_is_taken(stored, order):
    manifest = check_step(stored(), 3, describe(), order)
    assert manifest.source == "vllm" and manifest.data_after["position"] == 5


@pytest.mark.parametrize("flags", [
    "--lr 1e-3", "--reward math_verify", "--kl-coefficient 0.1", "--clip-range-low 0.1", "--seed 7", "--rollout-is token",
    "--rollouts-from elsewhere",
])  # fmt: skip
def test_what_training_alone_depends_on_may_differ(stored, order, flags):
    check_step(stored(), 3, describe(flags), order)


@pytest.mark.parametrize("flags, sentence", [
    ("--sampling-temperature 0.5", "sampled with --sampling-temperature 1.0, unlike this run's --sampling-temperature 0.5"),
    ("--sampling-top-p 0.9", "sampled with --sampling-top-p 1.0, unlike"),
    ("--sampling-top-k 5", "sampled with --sampling-top-k 0, unlike"),
    ("--max-response-length 8", "sampled with --max-response-length 1024, unlike"),
    ("--group-size 4", "sampled with --group-size 8, unlike"),
    ("--group-filter drop_uniform", "sampled with --group-filter none, unlike"),
    ("--prompts-per-step 2", "sampled with --prompts-per-step 1, unlike"),
    ("--model-preset tiny-llama", "sampled with --model-preset tiny-qwen3.6, unlike"),
])  # fmt: skip
def test_other_sampling_is_refused(stored, order, flags, sentence):
    with pytest.raises(ValueError) as refused:
        check_step(stored(), 3, describe(flags), order)
    assert sentence in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("changes", [dict(words=("b", "a", "c", "<end>")), dict(words=(*WORDS, "d")), dict(stop_ids=(3, 0))])
def test_another_tokenizer_is_refused(stored, order, changes):
    with pytest.raises(ValueError, match="was sampled with another tokenizer, unlike this run's --tokenizer-path"):
        check_step(stored(), 3, describe(**changes), order)


def test_other_weights_another_place_and_other_data_are_refused(stored, order):
    with pytest.raises(ValueError, match="by weights of version 1, and step 3 trains those of version 2"):
        check_step(stored(weight_version=1), 3, describe(), order)
    moved = order.state_dict() | {"position": 3}
    with pytest.raises(ValueError, match=r"from another place of the data, or other data \(position 3 then and 4 now\)"):
        check_step(stored(data_before=moved), 3, describe(), order)
    other = order.state_dict() | {"fingerprint": "g"}
    with pytest.raises(ValueError, match=r"\(fingerprint 'g' then and 'f' now\)"):
        check_step(stored(data_before=other), 3, describe(), order)
    with pytest.raises(ValueError, match="holds no rollouts of step 4 .it has steps 3 to 3."):
        check_step(stored(), 4, describe(), order)


def test_other_weights_of_the_same_version_are_refused(stored, order):
    check_step(stored(lineage="sha256:aa"), 3, describe(), order, "sha256:aa")
    for unknown in (stored(lineage=""), "sha256:aa"), (stored(lineage="sha256:aa"), None):
        check_step(unknown[0], 3, describe(), order, unknown[1])
    with pytest.raises(ValueError) as refused:
        check_step(stored(lineage="sha256:aa"), 3, describe(), order, "sha256:bb")
    assert "sampled by other weights of version 2 than this run's" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("index", [0, 5, None])
def test_a_group_comes_back(index):
    group = make_group(index)
    back = unpack(group, torch.device("cpu"))
    assert back.prompt.tolist() == [[1, 2, 0]] and back.prompt.dtype == torch.int64
    assert back.scored == [True, False] and back.draw == (1, 4) and back.state is None
    assert pack(back, index) == group


def test_a_receipt_has_the_runs_figures():
    config = parse_arguments(f"{BASE} --rollouts-from d".split(), Machine(cuda=False, fused_adam=False, world_size=1))[1]
    records = [
        {"step": step, "rollout_log_ratio_mean": mean, "rollout_log_ratio_max": largest, "rollout_kl": kl}
        for step, mean, largest, kl in ((1, 9.0, 9.0, 9.0), (2, -0.5, 2.0, 0.25), (3, 0.0, 1.0, 0.75))
    ] + [{"step": 4}]  # a step in which nothing was trained
    found = describe_rollouts(config, SimpleNamespace(name="store", sampled_by="vllm"), records, 2)
    assert found == {
        "source": "store", "sampled_by": "vllm", "store": "d", "log_ratio_mean": -0.25, "log_ratio_max": 2.0, "kl": 0.5,
        **describe_responses(config),
    }
    assert "kl" not in describe_rollouts(config, SimpleNamespace(name="store", sampled_by="vllm"), records, 4)
