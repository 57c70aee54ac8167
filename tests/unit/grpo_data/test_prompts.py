import ast
import dataclasses
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.grpo import rewards
from megatron.grpo.prompts import DataConfig, load_prompts

REPOSITORY = Path(__file__).parents[3]


def config(**settings):
    return DataConfig(**({"prompt_data": "p", "tokenizer_path": "t"} | settings))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_loaded_prompt(tmp_path, word_tokenizer):
    rows = [
        {"prompt": "w1 w2", "answer": "w3", "topic": "x", "notes": {"a": 1}},
        {"prompt": "w1 w2 w3", "answer": 34},
        {"prompt": "w4", "answer": ["a", 2.5]},
    ]
    data = load_prompts(write(tmp_path / "train.jsonl", rows), config(), word_tokenizer)
    first = data[0]
    assert first.prompt_id == "train.jsonl:1"
    assert first.token_ids == (6, 7) and type(first.token_ids) is tuple
    assert first.answer == "w3"
    assert first.extra == {"topic": "x", "notes": {"a": 1}}
    assert [prompt.answer for prompt in data] == ["w3", "34", '["a", 2.5]']
    assert len(data) == 3 and data[-1] == data[2] and data[1:] == [data[1], data[2]]
    with pytest.raises(IndexError):
        data[3]


@pytest.mark.parametrize("flags", [{}, {"answer_column": "reward_model.ground_truth"}])
@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "folder"])
def test_verl_and_dapo_math_columns(tmp_path, word_tokenizer, flags, suffix):
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": f"w1 w{index}"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(index), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"id-{index}"},
        }
        for index in range(3)
    ]
    path = tmp_path / f"dapo.{suffix}"
    if suffix == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif suffix == "folder":
        import datasets

        datasets.Dataset.from_list(rows).save_to_disk(path)
    else:
        write(path, rows)
    data = load_prompts(str(path), config(**flags), word_tokenizer)
    assert [prompt.answer for prompt in data] == ["0", "1", "2"]
    assert word_tokenizer.convert_ids_to_tokens(data[2].token_ids) == ["<user>", "w1", "w2", "</s>", "<assistant>"]
    assert data[1].extra["data_source"] == "math_dapo" and data[1].extra["extra_info"] == {"index": "id-1"}
    assert "answers from `reward_model.ground_truth`" in str(data.report)


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"prompt": "w1 \ud800", "answer": ""}, "prompt"),
        ({"prompt": [{"role": "user", "content": "w1 \udfff"}], "answer": ""}, "prompt"),
        ({"prompt": "w1", "answer": "\ud800"}, "answer"),
        ({"prompt": "w1", "answer": ["a", {"b": "\udc00"}]}, "answer"),
    ],
)
def test_half_of_a_surrogate_pair_is_named(tmp_path, word_tokenizer, row, column):
    path = write(tmp_path / "d.jsonl", [{"prompt": "w1 \U0001f600", "answer": "\U0001f600"}, row])
    with pytest.raises(ValueError, match=f"row 2, column `{column}`: holds half of a surrogate pair") as refusal:
        load_prompts(path, config(), word_tokenizer)
    assert str(refusal.value).startswith(path) and str(refusal.value).isprintable()


def test_column_flags(tmp_path, word_tokenizer):
    path = write(tmp_path / "d.jsonl", [{"token_ids": [5, 6, 7], "task": {"question": "w2 w3"}, "gold": "w1"}])
    data = load_prompts(path, config(prompt_column="token_ids", answer_column="gold"), word_tokenizer)
    assert data[0].token_ids == (5, 6, 7) and data[0].extra == {"task": {"question": "w2 w3"}}
    chosen = config(prompt_column="task.question", answer_column="", apply_chat_template=True)
    data = load_prompts(path, chosen, word_tokenizer)
    assert data[0].token_ids == (3, 7, 8, 1, 4) and data[0].answer == ""
    assert "no answers" in str(data.report)


GOOD = {"prompt": "w1", "answer": "w2"}


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ({"question": "w1", "answer": "w2"}, "no column `prompt` .--prompt-column.; .* there are: question, answer"),
        ({"prompt": "w1", "reply": "w2"}, "no column `answer` .--answer-column.; .* there are: prompt, reply"),
        ({"prompt": None, "answer": "w2"}, "column `prompt` .--prompt-column. is null"),
        ({"prompt": "w1", "answer": None}, "column `answer` .--answer-column. is null"),
        ({"prompt": "", "answer": "w2"}, "column `prompt`: the prompt is empty .columns: prompt, answer."),
        ({"prompt": [], "answer": "w2"}, "the prompt is empty"),
        ({"prompt": [{"role": "user"}], "answer": "w2"}, "chat message 1 has no text in `content`"),
        ({"prompt": 7, "answer": "w2"}, "is a int"),
    ],
)
def test_a_bad_row_is_named(tmp_path, word_tokenizer, bad, sentence):
    path = write(tmp_path / "d.jsonl", [GOOD, GOOD, bad, GOOD])
    with pytest.raises(ValueError, match=sentence) as refusal:
        load_prompts(path, config(), word_tokenizer)
    assert str(refusal.value).startswith(f"{path}, row 3") and "\n" not in str(refusal.value)


def test_prompts_over_the_limit_are_dropped_whole_and_counted(tmp_path, word_tokenizer):
    rows = [{"prompt": " ".join(["w1"] * length), "answer": ""} for length in (3, 5, 4, 9, 2)]
    path = write(tmp_path / "d.jsonl", rows)
    data = load_prompts(path, config(prompt_length_limit=4), word_tokenizer)
    assert [len(prompt.token_ids) for prompt in data] == [3, 4, 2]
    assert [prompt.prompt_id for prompt in data] == ["d.jsonl:1", "d.jsonl:3", "d.jsonl:5"]
    report = data.report
    assert (report.rows, report.kept, report.dropped) == (5, 3, 2)
    assert (report.shortest_kept, report.longest_kept, report.longest_dropped) == (2, 4, 9)
    assert "3 of 5 prompts kept, 2 to 4 tokens" in str(report)
    assert "2 dropped as longer than --prompt-length-limit 4 (the longest has 9)" in str(report)
    assert "dropped" not in str(load_prompts(path, config(), word_tokenizer).report)
    with pytest.raises(ValueError, match="all 5 prompts are longer than --prompt-length-limit 1 .the shortest has 2"):
        load_prompts(path, config(prompt_length_limit=1), word_tokenizer)


def test_the_limit_counts_the_chat_template(tmp_path, word_tokenizer):
    path = write(tmp_path / "d.jsonl", [{"prompt": "w1 w2", "answer": ""}])
    assert load_prompts(path, config(prompt_length_limit=2), word_tokenizer).report.kept == 1
    with pytest.raises(ValueError, match="the shortest has 5 tokens"):
        load_prompts(path, config(prompt_length_limit=2, apply_chat_template=True), word_tokenizer)


def test_a_file_without_rows(tmp_path, word_tokenizer):
    with pytest.raises(ValueError, match="no rows"):
        load_prompts(write(tmp_path / "d.jsonl", []), config(), word_tokenizer)


def test_the_fingerprint_changes_with_what_is_trained_on(tmp_path, word_tokenizer):
    def fingerprint(rows, **settings):
        return load_prompts(write(tmp_path / "d.jsonl", rows), config(**settings), word_tokenizer).fingerprint

    rows = [{"prompt": "w1 w2", "answer": "w3"}, {"prompt": "w4", "answer": "w5"}]
    changed = [
        rows[::-1],
        rows[:1],
        [rows[0], rows[1] | {"answer": "w6"}],
        [rows[0], rows[1] | {"prompt": "w5"}],
        [{"prompt": "w1", "answer": "w3"}, {"prompt": "w2 w4", "answer": "w5"}],
    ]
    # The same bytes in a row, cut into prompts differently.
    assert fingerprint([{"prompt": "w1", "answer": ""}, rows[1]]) != fingerprint([{"prompt": "w1 w4", "answer": "w5"}])
    assert fingerprint(rows) == fingerprint(rows)
    assert len({fingerprint(rows), *map(fingerprint, changed)}) == 1 + len(changed)
    assert fingerprint(rows, apply_chat_template=True) != fingerprint(rows)


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"prompt_data": None}, "--prompt-data is required"),
        ({"tokenizer_path": ""}, "--tokenizer-path is required"),
        ({"prompt_column": ""}, "--prompt-column"),
        ({"prompts_per_step": 0}, "--prompts-per-step"),
        ({"prompt_length_limit": 0}, "--prompt-length-limit"),
    ],
)
def test_config_refuses_by_flag(settings, flag):
    with pytest.raises(ValueError, match=flag):
        config(**settings)


@pytest.mark.parametrize("config_class", [DataConfig, rewards.RewardConfig])
def test_every_field_has_a_default_and_a_help_text(config_class):
    """Megatron's ArgumentGroupFactory makes a flag of each field, with the docstring below it as help."""
    body = ast.parse(inspect.getsource(config_class)).body[0].body
    documented = {
        field.target.id
        for field, text in zip(body, body[1:])
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }
    for field in dataclasses.fields(config_class):
        assert field.name in documented
        assert field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        assert not isinstance(field.type, str)  # the factory reads the annotation itself


def test_prompts_and_rewards_import_neither_torch_nor_megatron_core():
    heavy = ("torch", "megatron.core", "megatron.training", "transformers", "datasets", "pyarrow", "reasoning_gym")
    modules = ("prompts", "prompt_order", "tokenizer", "rewards", "reward_pool", "reward_worker")
    program = f"import sys\n{''.join(f'import megatron.grpo.{name}; ' for name in modules)}\n"
    program += f"print([name for name in {heavy!r} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert run.stdout.strip() == "[]", run.stdout


