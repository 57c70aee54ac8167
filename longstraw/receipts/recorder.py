"""One run's record, all of it in one folder: metrics.jsonl, tensorboard/, receipt.json, run.png, and the terminal.

    with RunRecorder("runs/quickstart", last_step=60, rank=rank) as recorder:
        for step in ...:
            with recorder.clock.phase("capture"): ...
            recorder.record_step({"step": step, "reward_mean": ..., ...})
        recorder.finish(receipt, title="tiny-qwen3.6, exact, CP 2, G 8")

Every rank makes one and calls it alike; rank 0 writes and prints, and a W&B run may be on another. Left out: collectives.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from longstraw.receipts.console import RunConsole, summarize_run
from longstraw.receipts.host import read_resident_bytes
from longstraw.receipts.memory_timeline import MemoryTimeline
from longstraw.receipts.metrics import MetricsWriter, RunLogger, Scalar, open_tensorboard, read_metrics
from longstraw.receipts.phases import PhaseClock
from longstraw.receipts.plots import plot_run
from longstraw.receipts.receipt import Receipt, write_receipt


class RunRecorder:
    """Writes and shows a run's steps as they come, and its receipt, picture and table at the end.

    Args:
        directory: of the run; made if missing.
        last_step: number of the run's last step.
        rank: this process's global rank.
        resumed_step: the last step that the loaded checkpoint holds; 0 for a new run.
        tensorboard_folder: of the events, by default DIRECTORY/tensorboard.
        tensorboard_queue: events held back before they are written.
        wandb: a W&B run to log to, on any one rank.
        synchronize: see `PhaseClock`.
        held_bytes: what this rank holds now, for the receipt's memory over time.
    """

    def __init__(self, directory: str | os.PathLike, *, last_step: int, rank: int = 0, resumed_step: int = 0,
                 tensorboard_folder: str | os.PathLike | None = None, tensorboard_queue: int = 10,
                 wandb: RunLogger | None = None, synchronize: Callable[[], None] | None = None,
                 held_bytes: Callable[[], int] = read_resident_bytes):
        self.directory, self.rank = Path(directory), rank
        folder = tensorboard_folder or self.directory / "tensorboard"
        self.board = open_tensorboard(folder, resumed_step, queue_size=tensorboard_queue) if rank == 0 else None
        self.metrics = MetricsWriter(self.directory, rank=rank, resumed_step=resumed_step, tensorboard=self.board, wandb=wandb)
        self.console = RunConsole(last_step, first_step=resumed_step + 1, rank=rank)
        self.timeline = MemoryTimeline(held_bytes)
        self.clock = PhaseClock(synchronize, on_switch=self._switch_phase)

    def __enter__(self) -> "RunRecorder":
        self.console.__enter__()
        self.timeline.__enter__()
        return self

    def _switch_phase(self, name: str | None) -> None:
        self.timeline.enter(name)
        if name is not None:
            self.console.show_phase(name)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.timeline.__exit__(kind, error, trace)
        self.console.__exit__(kind, error, trace)
        self.metrics.close()
        if self.board is not None:
            self.board.close()

    def record_step(self, record: Mapping[str, Scalar]) -> None:
        """Writes a step's metrics, then shows them. Raises ValueError as `metrics.check_record` does."""
        self.metrics.write(record)
        self.console.show_step(record)

    def finish(self, receipt: Receipt, title: str = "") -> None:
        """Writes receipt.json and run.png, and prints the closing table."""
        if self.rank != 0:
            return
        records = read_metrics(self.metrics.path)
        write_receipt(self.directory / "receipt.json", receipt)
        plot_run(self.directory / "run.png", records, receipt, title=title)
        rows = [("semantics", receipt.semantics), *summarize_run(records, receipt.seconds), ("written to", str(self.directory))]
        self.console.show_table(title or "run", rows)
