"""metrics.jsonl: one line a step, whole or absent, and its mirrors in TensorBoard and W&B.

A run that resumes from step s cuts the lines after s (those steps are run again) and a last line that a crash tore, so
that the file always tells one run's story with each step once. Left out: reading across runs, and any averaging.
"""

import itertools
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

REQUIRED_KEYS = ("step", "reward_mean", "loss", "kl", "grad_norm", "seconds", "peak_bytes")
"""What every line has."""

MAY_BE_NULL = ("reward_mean", "loss", "kl", "grad_norm")
"""What a step that was rolled back, or trained on nothing, has no value for."""

EVAL_KEY = "eval_reward_mean"
"""Mean reward on held-out prompts; on the lines of steps after which an evaluation ran."""

Scalar = int | float | str | bool | None


class ScalarWriter(Protocol):
    """The part of TensorBoard's SummaryWriter that is used."""

    def add_scalar(self, tag: str, value: float, step: int) -> None: ...

    def flush(self) -> None: ...


class RunLogger(Protocol):
    """The part of a W&B run that is used."""

    def log(self, values: dict, step: int) -> None: ...


def check_record(record: Mapping[str, Scalar], previous_step: int | None) -> None:
    """Holds a step's metrics to the rules of the file.

    Raises:
        ValueError: a required key is missing, a value is not a finite number (or null where that has a meaning), or the
            step does not come after `previous_step`.
    """
    missing = [key for key in REQUIRED_KEYS if key not in record]
    if missing:
        raise ValueError(f"metrics of a step lack {', '.join(missing)}")
    for key, value in record.items():
        if value is None and (key in MAY_BE_NULL or key not in (*REQUIRED_KEYS, EVAL_KEY)):
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number and (key in (*REQUIRED_KEYS, EVAL_KEY) or not isinstance(value, (str, bool))):
            raise ValueError(f"metric {key} is {value!r}: it must be a number")
        if number and not math.isfinite(value):
            raise ValueError(f"metric {key} of step {record['step']} is {value}: a step that is not finite has no metrics")
    for key in ("step", "peak_bytes"):
        if not isinstance(record[key], int) or record[key] < 0:
            raise ValueError(f"metric {key} is {record[key]!r}: it must be a whole number, 0 or more")
    if previous_step is not None and record["step"] <= previous_step:
        raise ValueError(f"metrics of step {record['step']} come after those of step {previous_step}")


def read_metrics(path: str | os.PathLike) -> list[dict]:
    """Every line of a metrics file, oldest first; a last line without its end is left out.

    Raises:
        ValueError: a line before the last is not a JSON object with a step.
    """
    records = []
    text = Path(path).read_bytes().decode(errors="replace")
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            record = json.loads(line)
            record["step"]
        except (json.JSONDecodeError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number} is not a step's metrics: {line[:80]!r}") from error
        records.append(record)
    return records


def cut_after(path: Path, step: int) -> list[dict]:
    """Drops the lines of steps after `step` and a torn last line, in one atomic replacement; returns what stays."""
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    draft = path.with_name(path.name + ".new")
    with open(draft, "w") as file:
        file.writelines(format_line(record) for record in kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    return kept


def format_line(record: Mapping[str, Scalar]) -> str:
    return json.dumps(dict(record), allow_nan=False) + "\n"


def open_tensorboard(directory: str | os.PathLike, resumed_step: int = 0, *, queue_size: int = 10) -> ScalarWriter:
    """A TensorBoard writer whose viewers forget what an earlier run wrote after `resumed_step`.

    queue_size: events held back before they are written.
    """
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(os.fspath(directory), max_queue=queue_size, purge_step=resumed_step + 1)


def _set_aside(path: Path) -> None:
    """Keep an earlier run's metrics, if there are any, under the first free name: metrics-1.jsonl, metrics-2.jsonl, ..."""
    if path.exists() and path.stat().st_size:
        names = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(1))
        path.rename(next(name for name in names if not name.exists()))


class MetricsWriter:
    """Appends each step's metrics to DIRECTORY/metrics.jsonl, on rank 0 alone, and mirrors them to the writers given.

    Every rank checks each record. A mirror may be on any rank: Megatron's W&B run is on the last one.

    Args:
        directory: of the run; made if missing.
        rank: this process's global rank.
        resumed_step: the last step that the loaded checkpoint holds; 0 for a new run, which starts the file anew.
        tensorboard: a writer to mirror numbers to, as `train/KEY` and `eval/reward_mean`; see `open_tensorboard`.
        wandb: a W&B run to log each record to.
    """

    def __init__(self, directory: str | os.PathLike, *, rank: int = 0, resumed_step: int = 0,
                 tensorboard: ScalarWriter | None = None, wandb: RunLogger | None = None):
        self.path = Path(directory) / "metrics.jsonl"
        self.tensorboard, self.wandb = tensorboard, wandb
        self.last_step: int | None = None
        self._file: int | None = None
        if rank == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not resumed_step:
                _set_aside(self.path)
            if self.path.exists() and (kept := cut_after(self.path, resumed_step if resumed_step else -1)):
                self.last_step = kept[-1]["step"]
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, record: Mapping[str, Scalar]) -> None:
        """Adds one step. Raises ValueError as `check_record` does, before anything is written."""
        check_record(record, self.last_step)
        self.last_step = record["step"]
        if self._file is not None:
            self._append(record)
        if self.tensorboard is not None:
            for key, value in record.items():
                if key != "step" and isinstance(value, (int, float)):
                    tag = "eval/reward_mean" if key == EVAL_KEY else f"train/{key}"
                    self.tensorboard.add_scalar(tag, value, record["step"])
            self.tensorboard.flush()
        if self.wandb is not None:
            self.wandb.log({key: value for key, value in record.items() if key != "step"}, step=record["step"])

    def _append(self, record: Mapping[str, Scalar]) -> None:
        line = format_line(record).encode()
        # One write of one whole line: a reader, or a crash, meets either all of it or a last line without its end.
        if os.write(self._file, line) != len(line):
            raise OSError(f"{self.path}: the disk took only part of a line")
        os.fsync(self._file)

    def close(self) -> None:
        """Closes the file; the mirrors belong to whoever opened them."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_) -> None:
        self.close()
