"""What a run shows in the terminal: a progress bar with the current phase, one line a step, a short table at the end.

Off a terminal (a Slurm log, a pipe) there is no bar, only plain lines. Ranks other than 0 show nothing. Left out:
levels, colours by flag, and logging to files (metrics.jsonl and the receipt hold everything).
"""

import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from longstraw.receipts.metrics import EVAL_KEY
from longstraw.receipts.plots import scale_bytes


def format_bytes(count: int) -> str:
    """As a person reads it: 1536 -> '1.5 KiB'."""
    divisor, unit = scale_bytes(count)
    return f"{count / divisor:.4g} {unit}"


def format_seconds(seconds: float) -> str:
    """As a person reads it: 3725 -> '1 h 02 min'."""
    if seconds < 90:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 90 else f"{minutes} min"


def format_step(record: Mapping, last_step: int) -> str:
    """One step's metrics as one line."""
    def number(key: str, digits: str) -> str:
        return "-" if record[key] is None else format(record[key], digits)

    width = len(str(last_step))
    line = (f"step {record['step']:>{width}}/{last_step}  reward {number('reward_mean', '.3f')}  loss {number('loss', '+.4f')}"
            f"  kl {number('kl', '.2e')}  grad norm {number('grad_norm', '.3g')}  {format_seconds(record['seconds'])}"
            f"  peak {format_bytes(record['peak_bytes'])}")
    return line if record.get(EVAL_KEY) is None else f"{line}  held-out {record[EVAL_KEY]:.3f}"


class RunConsole:
    """A run's place in the terminal; use it as a context manager around the steps.

    Args:
        last_step: number of the run's last step.
        first_step: number of the first step of this process; above 1 where it resumed.
        rank: this process's global rank; all but 0 are silent.
        stream: where to write; standard output by default.
        bar: draw a progress bar; by default where the stream is a terminal.
    """

    def __init__(self, last_step: int, *, first_step: int = 1, rank: int = 0, stream: TextIO | None = None,
                 bar: bool | None = None):
        self.last_step, self.rank = last_step, rank
        self._console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        if rank == 0 and (self._is_drawable() if bar is None else bar):
            self._progress = Progress(
                TextColumn("[bold]{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(),
                TextColumn("{task.fields[reward]}"), TextColumn("[dim]{task.fields[phase]:<10}"),
                TimeElapsedColumn(), TextColumn("[dim]left"), TimeRemainingColumn(), console=self._console, expand=True)
            self._task = self._progress.add_task("training", total=last_step, completed=first_step - 1, phase="", reward="")

    def _is_drawable(self) -> bool:
        return self._console.is_terminal and not self._console.is_dumb_terminal

    def __enter__(self) -> "RunConsole":
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.update(self._task, phase="stopped" if error is not None else "done")
            self._progress.stop()

    def show_phase(self, name: str) -> None:
        """Names what the current step is doing; see `PhaseClock`. Off a terminal this shows nothing."""
        if self._progress is not None:
            self._progress.update(self._task, phase=name)

    def show_step(self, record: Mapping) -> None:
        """Shows a committed step's metrics and moves the bar on."""
        if self._progress is not None:
            reward = "" if record["reward_mean"] is None else f"reward {record['reward_mean']:.3f}"
            self._progress.update(self._task, completed=record["step"], reward=reward)
        self.say(format_step(record, self.last_step))

    def say(self, text: str) -> None:
        """Prints a line above the bar, as it is: brackets are not markup."""
        if self.rank == 0:
            self._console.print(Text(text))

    def show_table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Prints a table of names and values."""
        if self.rank != 0:
            return
        if not self._is_drawable():
            width = max((len(name) for name, _ in rows), default=0)
            for line in (title, *(f"  {name:<{width}}  {value}" for name, value in rows)):
                self.say(line)
            return
        table = Table(title=Text(title, style="bold"), title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(Text(name), Text(value))
        self._console.print(table)


def summarize_run(records: Sequence[Mapping], seconds: Mapping[str, float]) -> list[tuple[str, str]]:
    """The rows of a run's closing table, from its metrics and its seconds by phase.

    Raises:
        ValueError: there is no step to summarise.
    """
    if not records:
        raise ValueError("no step to summarise")
    evaluations = [record for record in records if record.get(EVAL_KEY) is not None]
    rewards = [record["reward_mean"] for record in records if record["reward_mean"] is not None]
    rows = [("steps", f"{records[0]['step']} to {records[-1]['step']}")]
    if evaluations:
        rows.append(("held-out reward", f"{evaluations[0][EVAL_KEY]:.3f} (step {evaluations[0]['step']}) -> "
                                        f"{evaluations[-1][EVAL_KEY]:.3f} (step {evaluations[-1]['step']})"))
    if rewards:
        tenth = max(1, len(rewards) // 10)
        first, last = (sum(part) / tenth for part in (rewards[:tenth], rewards[-tenth:]))
        rows.append(("training reward", f"{first:.3f} -> {last:.3f} (first and last {f'{tenth} steps' if tenth > 1 else 'step'})"))
    rows.append(("peak memory", f"{format_bytes(max(record['peak_bytes'] for record in records))} on rank 0"))
    rows.append(("time a step", format_seconds(sum(record["seconds"] for record in records) / len(records))))
    total = sum(seconds.values())
    if seconds:
        rows.append(("all steps", format_seconds(total)))
    for name, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        rows.append((f"  {name}", f"{format_seconds(spent)} ({100 * spent / total:.0f} %)" if total else format_seconds(spent)))
    return rows
