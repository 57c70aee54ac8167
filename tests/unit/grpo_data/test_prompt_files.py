import json

import pytest

from megatron.grpo.prompt_files import describe_columns, find_column, read_rows

ROWS = [
    {"prompt": "one", "answer": "1", "extra_info": {"index": 0}},
    {"prompt": "two", "answer": "2", "extra_info": {"index": 1}},
    {"prompt": "three", "answer": "3", "extra_info": {"index": 2}},
]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path, rows):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def write_folder(path, rows):
    import datasets

    datasets.Dataset.from_list(rows).save_to_disk(path)
    return path


@pytest.mark.parametrize("write", [write_jsonl, write_parquet, write_folder])
def test_each_format_gives_the_same_rows(tmp_path, write):
    suffix = {write_jsonl: ".jsonl", write_parquet: ".parquet", write_folder: ""}[write]
    path = write(tmp_path / f"data{suffix}", ROWS)
    rows = list(read_rows(path))
    assert [row.columns for row in rows] == ROWS
    assert [row.number for row in rows] == [1, 2, 3]
    assert rows[1].place == f"{path}, row 2"


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_a_folder_of_shards_is_read_in_name_order(tmp_path, write):
    suffix = ".jsonl" if write is write_jsonl else ".parquet"
    write(tmp_path / f"part-1{suffix}", ROWS[2:])
    write(tmp_path / f"part-0{suffix}", ROWS[:2])
    rows = list(read_rows(tmp_path))
    assert [row.columns for row in rows] == ROWS
    assert rows[2].place == f"{tmp_path / f'part-1{suffix}'}, row 1"


def test_jsonl_rows_keep_their_own_keys_and_line_numbers(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"a": {"x": 1}}\n\n{"a": {"y": [1, 2]}}\n')
    assert [(row.number, row.columns) for row in read_rows(path)] == [(1, {"a": {"x": 1}}), (3, {"a": {"y": [1, 2]}})]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"a": 1}\n{"a": ', "row 2: not valid JSON"),
        ("[1, 2]\n", "row 1: a JSON list, but each line must be an object"),
    ],
)
def test_jsonl_names_the_bad_line(tmp_path, content, sentence):
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=sentence) as refusal:
        list(read_rows(path))
    assert str(path) in str(refusal.value)


def test_paths_that_hold_no_prompts(tmp_path):
    with pytest.raises(ValueError, match="no such file or folder"):
        list(read_rows(tmp_path / "missing.jsonl"))
    with pytest.raises(ValueError, match="no state.json.*no .jsonl or .parquet"):
        list(read_rows(tmp_path))
    (tmp_path / "data.csv").write_text("prompt,answer\n")
    with pytest.raises(ValueError, match="prompts are read from .jsonl, .parquet or"):
        list(read_rows(tmp_path / "data.csv"))
    write_jsonl(tmp_path / "data.jsonl", ROWS)
    write_parquet(tmp_path / "data.parquet", ROWS)
    with pytest.raises(ValueError, match="both .jsonl and .parquet"):
        list(read_rows(tmp_path))


def test_a_folder_of_splits_asks_for_one(tmp_path):
    import datasets

    split = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=split, test=split).save_to_disk(tmp_path / "data")
    with pytest.raises(ValueError, match="holds the splits train, test; name the folder of one"):
        list(read_rows(tmp_path / "data"))
    assert len(list(read_rows(tmp_path / "data" / "test"))) == 3


def test_dotted_column_names():
    columns = {"reward_model": {"ground_truth": "7", "style": "rule"}, "a.b": 1, "a": {"b": 2}, "empty": {}, "n": None}
    assert find_column(columns, "reward_model.ground_truth") == (True, "7")
    assert find_column(columns, "a.b") == (True, 1)
    assert find_column(columns, "n") == (True, None)
    for missing in ("reward_model.answer", "reward_model.style.x", "b", "", "n.x"):
        assert find_column(columns, missing) == (False, None)
    assert describe_columns(columns) == "reward_model.ground_truth, reward_model.style, a.b, a.b, empty, n"
    assert describe_columns({}) == "none"
