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


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested more than 100 levels deep"),
        (b'{"a": ' + b'{"b": ' * 100 + b"1" + b"}" * 101, "nested more than 100 levels deep"),
        ('{"a": "Zürich"}'.encode("latin-1"), "not UTF-8 .*byte 8 of the line"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not valid JSON"),
        (b'{"a": 1}\xef\xbb\xbf', "not valid JSON"),
    ],
    ids=["very deep", "one level too deep", "Latin-1", "too many digits", "byte order mark inside"],
)
def test_lines_that_break_the_reader_are_named(tmp_path, line, sentence):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"a": 1}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=f"row 3: {sentence}") as refusal:
        list(read_rows(path))
    assert str(refusal.value).startswith(str(path)) and type(refusal.value) is ValueError


def test_what_looks_odd_and_is_fine_is_read(tmp_path):
    path = tmp_path / "data.jsonl"
    deep = "[" * 99 + "]" * 99
    path.write_bytes(b'\xef\xbb\xbf{"a": "Z\xc3\xbcrich"}\r\n' + f'{{"b": {deep}}}'.encode())
    first, second = read_rows(path)
    assert first.columns == {"a": "Zürich"} and json.dumps(second.columns["b"]) == deep


@pytest.mark.parametrize("content", [b"", b"PAR1 and nothing behind it", b'{"a": 1}\n'], ids=["empty", "cut", "JSONL"])
def test_a_broken_parquet_file_is_named(tmp_path, content):
    path = tmp_path / "data.parquet"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="row 1: not a readable Parquet file") as refusal:
        list(read_rows(path))
    assert str(refusal.value).startswith(str(path)) and "\n" not in str(refusal.value)


def test_a_parquet_file_that_breaks_off_names_the_row(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "data.parquet"
    columns = pyarrow.table({"a": [b"x", b"\xff"]}).cast(pyarrow.schema({"a": pyarrow.binary()}))
    texts = pyarrow.StringArray.from_buffers(2, *columns["a"].chunk(0).buffers()[1:])
    pyarrow.parquet.write_table(pyarrow.table({"a": texts}), path)
    with pytest.raises(ValueError, match="row 1: not a readable Parquet file .*UnicodeDecodeError"):
        list(read_rows(path))


def test_a_broken_dataset_folder_is_named(tmp_path):
    folder = write_folder(tmp_path / "data", ROWS)
    next(folder.glob("*.arrow")).write_bytes(b"no arrow")
    with pytest.raises(ValueError, match="row 1: not a readable Hugging Face dataset folder"):
        list(read_rows(folder))
    (folder / "dataset_dict.json").write_text("[]")
    with pytest.raises(ValueError, match="dataset_dict.json: not a list of splits"):
        list(read_rows(folder))


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
