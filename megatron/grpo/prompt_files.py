"""Read the rows of a prompt file: JSONL, Parquet, a folder of either, or a Hugging Face dataset folder.

Each row comes back as a plain dict together with the place it came from, so that every complaint can name a
file and a row. JSONL is read line by line instead of through `datasets`, whose JSON reader gives all rows one
schema and so fills a dict with the null keys of its neighbours; that would change what a reward function sees.

Left out: remote paths, compressed JSONL, and splits chosen by name (point at the split's own folder or file).
"""

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARD_SUFFIXES = (".jsonl", ".parquet")
DEEPEST = 100
"""Levels of lists and objects inside a row, at most: what reads and sends rows later recurses into them."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a prompt file.

    `number` counts from 1 within `source`; for JSONL it is the line number.
    """

    source: Path
    number: int
    columns: dict[str, Any]

    @property
    def place(self) -> str:
        """The file and row, as an error message names them."""
        return f"{self.source}, row {self.number}"


def read_rows(path: str | Path) -> Iterator[Row]:
    """Yield the rows at `path` in file order.

    Args:
        path: a `.jsonl` or `.parquet` file, a folder holding files of one of these kinds (read in name order), or
            a folder written by `datasets.Dataset.save_to_disk`.

    Raises:
        ValueError: the path does not exist, is of another kind, cannot be read as what it claims to be, or holds a line
            that is not a JSON object or a row nested deeper than DEEPEST; with the file and the row.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    if path.is_file():
        yield from _read_file(path)
    elif (path / "dataset_dict.json").exists():
        try:
            splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path / 'dataset_dict.json'}: not a list of splits ({error})") from error
        raise ValueError(
            f"{path}: this dataset folder holds the splits {', '.join(splits)}; name the folder of one, "
            f"such as {path / splits[0]}"
        )
    elif (path / "state.json").exists():
        yield from _read_dataset_folder(path)
    else:
        for shard in _list_shards(path):
            yield from _read_file(shard)


def find_column(columns: dict[str, Any], name: str) -> tuple[bool, Any]:
    """Look up a column by name, or by a dotted name inside nested columns.

    `reward_model.ground_truth` finds `columns["reward_model"]["ground_truth"]`; a column literally called
    `reward_model.ground_truth` comes first.

    Returns:
        (whether it is there, its value or None).
    """
    if name in columns:
        return True, columns[name]
    value: Any = columns
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return False, None
        value = value[part]
    return True, value


def describe_columns(columns: dict[str, Any]) -> str:
    """Name the columns of a row, those inside a nested column by their dotted names."""
    names = []
    for name, value in columns.items():
        if isinstance(value, dict) and value:
            names.extend(f"{name}.{inner}" for inner in value)
        else:
            names.append(name)
    return ", ".join(names) if names else "none"


def _list_shards(folder: Path) -> list[Path]:
    shards = sorted(entry for entry in folder.iterdir() if entry.suffix in SHARD_SUFFIXES)
    if not shards:
        raise ValueError(
            f"{folder}: not a Hugging Face dataset folder (no state.json), and no .jsonl or .parquet file in it"
        )
    if len({shard.suffix for shard in shards}) > 1:
        raise ValueError(f"{folder}: holds both .jsonl and .parquet files; name one file or keep one kind")
    return shards


def _read_file(path: Path) -> Iterator[Row]:
    if path.suffix == ".jsonl":
        return _read_jsonl(path)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    raise ValueError(f"{path}: prompts are read from .jsonl, .parquet or a Hugging Face dataset folder")


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:  # decoded line by line, so that a complaint can name the row
        for number, line in enumerate(lines, start=1):
            row = f"{path}, row {number}"
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            try:
                columns = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise ValueError(f"{row}: not UTF-8 ({error.reason} at byte {error.start} of the line)") from error
            except ValueError as error:  # also a number of more digits than Python converts
                raise ValueError(f"{row}: not valid JSON ({error})") from error
            except RecursionError:
                raise ValueError(_too_deep(row)) from None
            if not isinstance(columns, dict):
                raise ValueError(f"{row}: a JSON {type(columns).__name__}, but each line must be an object")
            if _nests_deeper(columns, DEEPEST):
                raise ValueError(_too_deep(row))
            yield Row(source=path, number=number, columns=columns)


def _too_deep(row: str) -> str:
    return f"{row}: nested more than {DEEPEST} levels deep"


def _nests_deeper(value: Any, levels: int) -> bool:
    """Whether lists and dicts lie more than so many levels inside each other."""
    layer = [value]
    for _ in range(levels):
        layer = [
            inner
            for outer in layer
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not layer:
            return False
    return True


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=256):
                for columns in batch.to_pylist():
                    number += 1
                    yield Row(source=path, number=number, columns=columns)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(_unreadable(path, number, "Parquet file", error)) from error


def _read_dataset_folder(path: Path) -> Iterator[Row]:
    import datasets
    import pyarrow

    number = 0
    try:
        for number, columns in enumerate(datasets.load_from_disk(str(path)), start=1):
            yield Row(source=path, number=number, columns=columns)
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(_unreadable(path, number, "Hugging Face dataset folder", error)) from error


def _unreadable(path: Path, number: int, kind: str, error: Exception) -> str:
    """The sentence for a file that breaks off behind row `number`, in one line whatever the reader says."""
    return f"{path}, row {number + 1}: not a readable {kind} ({type(error).__name__}: {' '.join(str(error).split())})"
