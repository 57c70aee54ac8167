"""The recall generator: what it writes is what the loader, the tokenizer and the reward expect."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

REPOSITORY = Path(__file__).parents[3]
sys.path.insert(0, str(REPOSITORY / "examples" / "recall"))

import make_data as recall_data  # noqa: E402
from recall_task import (  # noqa: E402
    ASK,
    EOS,
    RecallVocabulary,
    advance_num_facts,
    build_tokenizer,
    make_recall_prompt,
    make_warm_start_sequence,
    to_text,
)

VOCABULARY = RecallVocabulary()


def read_facts(words, answer_tokens):
    """The facts in a text, read back independently: each key word with the values that follow it."""
    return {
        word: words[place + 1 : place + 1 + answer_tokens]
        for place, word in enumerate(words)
        if word.startswith("k") and (place == 0 or words[place - 1] != ASK)
    }


sizes = st.tuples(st.integers(1, 48), st.integers(1, 3), st.integers(0, 70), st.integers(0, 10**6))


@given(sizes)
@settings(max_examples=40, deadline=None)
def test_a_prompt_holds_its_answer_once(drawn):
    num_facts, answer_tokens, filler, seed = drawn
    prompt_tokens = num_facts * (1 + answer_tokens) + filler + 2
    prompt = make_recall_prompt(
        Random(seed), VOCABULARY, num_facts=num_facts, prompt_tokens=prompt_tokens, answer_tokens=answer_tokens
    )
    words = to_text(VOCABULARY, prompt.token_ids).split()
    assert len(prompt.token_ids) == len(words) == prompt_tokens
    facts = read_facts(words[:-2], answer_tokens)
    assert len(facts) == num_facts  # so each key is there once
    assert sum(word.startswith("w") for word in words) == filler
    assert words[-2] == ASK
    assert facts[words[-1]] == to_text(VOCABULARY, prompt.answer_ids).split()
    assert all(value.startswith("v") for values in facts.values() for value in values)
    assert prompt.fact_depth == words.index(words[-1]) / prompt_tokens


@given(sizes, st.integers(1, 60))
@settings(max_examples=40, deadline=None)
def test_a_warm_start_sequence_asks_in_the_prompts_grammar(drawn, num_questions):
    num_facts, answer_tokens, filler, seed = drawn
    context_tokens = num_facts * (1 + answer_tokens) + filler
    sequence = make_warm_start_sequence(
        Random(seed),
        VOCABULARY,
        num_facts=num_facts,
        context_tokens=context_tokens,
        num_questions=num_questions,
        answer_tokens=answer_tokens,
    )
    words = to_text(VOCABULARY, sequence.token_ids).split()
    assert len(words) == len(sequence.loss_mask) == context_tokens + num_questions * (3 + answer_tokens)
    facts = read_facts(words[:context_tokens], answer_tokens)
    asked = []
    for question in range(num_questions):
        start = context_tokens + question * (3 + answer_tokens)
        ask, key, *values, end = words[start : start + 3 + answer_tokens]
        assert (ask, end) == (ASK, EOS) and values == facts[key]
        assert sequence.loss_mask[start : start + 3 + answer_tokens] == [0, 0, *[1] * answer_tokens, 1]
        asked.append(key)
    assert sum(sequence.loss_mask[:context_tokens]) == 0
    assert words[sequence.prompt_length - 2 : sequence.prompt_length] == [ASK, asked[0]]
    counts = [asked.count(key) for key in facts]
    assert max(counts) - min(counts) <= 1  # every fact is asked before any is asked again


def test_facts_stand_anywhere_and_every_fact_is_asked():
    depths = []
    for seed in range(300):
        prompt = make_recall_prompt(Random(seed), VOCABULARY, num_facts=3, prompt_tokens=200)
        depths.append(prompt.fact_depth)
    assert min(depths) < 0.05 and max(depths) > 0.9 and 0.4 < sum(depths) / len(depths) < 0.6


def test_the_curriculum_doubles_up_to_its_end():
    facts, steps = 4, [4]
    for accuracy in (0.94, 0.95, 1.0, 0.0, 0.99, 1.0):
        facts = advance_num_facts(facts, accuracy, most=28)
        steps.append(facts)
    assert steps == [4, 4, 8, 16, 16, 28, 28]
    assert advance_num_facts(4, 0.8, most=28, threshold=0.8) == 8


@given(st.integers(1, 60), st.integers(2, 60), st.integers(1, 40))
@settings(max_examples=15, deadline=None)
def test_the_tokenizer_and_the_ids_agree(num_keys, num_values, num_fillers):
    vocabulary = RecallVocabulary(
        num_keys=num_keys, num_values=num_values, num_tokens=4 + num_keys + num_values + num_fillers
    )
    assert len(vocabulary.words) == len(set(vocabulary.words)) == vocabulary.num_tokens
    tokenizer = build_tokenizer(vocabulary)
    ids = list(range(vocabulary.num_tokens))
    assert len(tokenizer) == vocabulary.num_tokens
    assert tokenizer(to_text(vocabulary, ids))["input_ids"] == ids
    assert vocabulary.words[vocabulary.key_id(0)].startswith("k")
    assert vocabulary.words[vocabulary.value_id(0)].startswith("v")
    assert vocabulary.words[vocabulary.filler_id(num_fillers - 1)] == vocabulary.words[-1]


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"num_keys": 0}, "--vocab-keys"),
        ({"num_values": 1}, "--vocab-values"),
        ({"num_tokens": 100}, "--vocab-tokens 100 leaves no filler word"),
    ],
)
def test_a_vocabulary_that_does_not_fit(settings, flag):
    with pytest.raises(ValueError, match=flag):
        RecallVocabulary(**settings)


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"num_facts": 49}, "--num-facts 49 must be from 1 to --vocab-keys 48"),
        ({"num_facts": 0}, "--num-facts 0"),
        ({"answer_tokens": 0}, "--answer-tokens"),
        ({"prompt_tokens": 21}, "10 facts .* do not fit into a context of 19 tokens"),
    ],
)
def test_a_prompt_that_does_not_fit(settings, flag):
    with pytest.raises(ValueError, match=flag):
        make_recall_prompt(Random(0), VOCABULARY, **({"num_facts": 10, "prompt_tokens": 50} | settings))


def test_a_sequence_without_questions():
    with pytest.raises(ValueError, match="at least one question, not 0"):
        make_warm_start_sequence(Random(0), VOCABULARY, num_facts=2, context_tokens=9, num_questions=0)


def write(folder, **settings):
    defaults = {"num_train": 6, "num_eval": 4, "seed": 0, "num_facts": 5, "prompt_tokens": 40, "answer_tokens": 2}
    recall_data.write_data(folder, vocabulary=VOCABULARY, **(defaults | settings))


def test_written_data_loads_and_its_answers_score(tmp_path):
    from megatron.grpo.prompts import DataConfig, load_prompts
    from megatron.grpo.reward_functions import exact_match
    from megatron.grpo.tokenizer import decode_response, load_tokenizer, stop_token_ids

    write(tmp_path)
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    assert stop_token_ids(tokenizer, tmp_path / "tokenizer") == (tokenizer.convert_tokens_to_ids(EOS),)
    for split, size in (("train", 6), ("eval", 4)):
        path = str(tmp_path / f"{split}.jsonl")
        data = load_prompts(path, DataConfig(prompt_data=path, tokenizer_path="tokenizer"), tokenizer)
        assert len(data) == size
        for prompt in data:
            assert len(prompt.token_ids) == 40 and tokenizer.unk_token_id not in prompt.token_ids
            assert set(prompt.extra) == {"fact_depth", "num_facts"}
            response = [*tokenizer(prompt.answer)["input_ids"], tokenizer.eos_token_id]
            assert len(response) == 3
            assert exact_match("", decode_response(tokenizer, response), prompt.answer, prompt.extra) == 1.0


def test_splits_are_drawn_apart_and_repeat(tmp_path):
    def rows(folder, split, **settings):
        write(tmp_path / folder, **settings)
        return [json.loads(line) for line in (tmp_path / folder / f"{split}.jsonl").read_text().splitlines()]

    train, evaluation = rows("a", "train"), rows("a", "eval")
    assert rows("b", "train", num_train=9, num_eval=1)[:6] == train
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in evaluation}
    assert rows("c", "train", seed=1) != train


def test_the_command_refuses_in_one_sentence(tmp_path):
    command = [sys.executable, "examples/recall/make_data.py", "--output", str(tmp_path / "out"), "--num-facts", "99"]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert run.returncode == 1 and run.stdout == ""
    assert run.stderr.count("\n") == 1 and "--num-facts 99" in run.stderr
