"""Compute rewards in worker processes, each sample under a time limit, in the order of the samples.

A worker is a fresh Python started once and kept (`reward_worker`). One that runs over its sample's limit is killed
with its process group and replaced; the sample is counted as timed out and the others go on. The limit runs from the
moment a worker that has loaded its functions receives the sample, so imports do not count.

Only the rank that calls `score` starts workers. Left out: sharing a pool between ranks, and retries.
"""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from megatron.grpo.reward_worker import START
from megatron.grpo.rewards import RewardConfig, RewardResult, RewardSample

START_LIMIT = 300.0
"""Seconds that a worker may take to import its reward functions."""

DISTRIBUTED_VARIABLES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""Environment variables that a worker must not see, together with all that start with TORCHELASTIC_: a reward
function that uses torch.distributed would otherwise join the trainer's job."""

BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from megatron.grpo.reward_worker import serve; "
    "serve(int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))"
)
# Not multiprocessing's spawn: that would import the trainer's main module, and all of Megatron, in every worker.


@dataclass(kw_only=True, eq=False)
class _Worker:
    process: subprocess.Popen
    connection: Connection
    deadline: float
    """Monotonic time by which it must have started, or answered."""
    ready: bool = False
    sample_index: int | None = None
    number: int = START
    """Of the sample it has: messages under another number, or from another process, are not its answer."""
    running: int = 0
    """Index of the reward function it last began."""

    def receive(self) -> tuple[str, Any] | None:
        """(kind, payload) of the next message, if there is one and it is this worker's on its present sample.

        A process that a reward function forked has the same pipe.
        """
        pid, number, kind, payload = self.connection.recv()
        return (kind, payload) if (pid, number) == (self.process.pid, self.number) else None


class RewardPool:
    """Scores samples in killable worker processes.

    Use as a context manager, or call `close`. Workers start at `start` or at the first `score`. One thread uses it at
    a time; others wait. The kernel ties a worker to the thread that started it: let that be one which lives as long
    as the pool.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._closed = False
        self._samples_sent = START
        # At interpreter exit too, so that no killed worker stays behind as a zombie of a long-lived parent.
        self._finalizer = weakref.finalize(self, _stop_all, self._workers, os.getpid())

    def start(self) -> None:
        """Start all workers and wait until they have loaded the reward functions.

        Raises:
            ValueError: a name in --reward cannot be resolved.
            RuntimeError: a worker died, or was not ready within `START_LIMIT`.
        """
        with self._lock:
            self._start_workers(self.config.reward_workers)
            while starting := [worker for worker in self._workers if not worker.ready]:
                _wait_for(starting)
                for worker in starting:
                    self._receive_start(worker)

    def score(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """Score all samples; the results are in their order.

        Never raises for what a reward function does: that is in the result's status.

        Raises:
            ValueError, RuntimeError: as `start`.
        """
        with self._lock:
            results: list[RewardResult | None] = [None] * len(samples)
            waiting = deque(range(len(samples)))
            while any(result is None for result in results):
                busy = sum(worker.sample_index is not None for worker in self._workers)
                self._start_workers(min(self.config.reward_workers, busy + len(waiting)))
                self._dispatch(samples, waiting)
                active = [worker for worker in self._workers if not worker.ready or worker.sample_index is not None]
                if not active:  # every worker was found dead on dispatch; start others
                    continue
                _wait_for(active)
                for worker in active:
                    if not worker.ready:
                        self._receive_start(worker)
                    else:
                        index = worker.sample_index
                        result = self._receive_result(worker)
                        if result is not None:
                            results[index] = result
            return results

    def worker_pids(self) -> list[int]:
        """Process ids of the workers alive now."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """Kill every worker and wait until it is gone. A closed pool scores nothing."""
        self._closed = True
        self._finalizer()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _start_workers(self, count: int) -> None:
        if self._closed:
            raise RuntimeError("the reward pool is closed")
        while len(self._workers) < count:
            self._workers.append(_start_worker(self.config.reward))

    def _dispatch(self, samples: Sequence[RewardSample], waiting: deque[int]) -> None:
        """Give each idle worker a sample; drop those that died while idle."""
        for worker in [worker for worker in self._workers if worker.ready and worker.sample_index is None]:
            if not waiting:
                return
            sample = samples[waiting[0]]
            try:
                worker.connection.send(
                    (self._samples_sent + 1, (sample.prompt, sample.response, sample.answer, sample.extra))
                )
            except OSError:
                # Between samples a worker runs no reward function: another one can take this sample.
                self._discard(worker)
                continue
            self._samples_sent += 1
            worker.number = self._samples_sent
            worker.sample_index = waiting.popleft()
            worker.running = 0
            worker.deadline = time.monotonic() + self.config.reward_timeout

    def _receive_start(self, worker: _Worker) -> None:
        pid = worker.process.pid
        try:
            message = worker.receive() if worker.connection.poll() else None
        except (EOFError, OSError):
            code = self._discard(worker, grace=1.0)
            raise RuntimeError(f"reward worker {pid} died while it loaded {self.config.reward} ({code})") from None
        if message is None:
            if time.monotonic() >= worker.deadline:
                self._discard(worker)
                raise RuntimeError(f"reward worker {pid} had not loaded {self.config.reward} after {START_LIMIT:g} s")
        elif message[0] == "refused":
            self.close()
            raise ValueError(message[1])
        else:
            worker.ready = True

    def _receive_result(self, worker: _Worker) -> RewardResult | None:
        """Read what the worker has sent; the result if its sample is settled, else None."""
        pid = worker.process.pid
        try:
            while worker.connection.poll():
                message = worker.receive()
                if message is None:
                    continue
                kind, payload = message
                if kind == "done":
                    worker.sample_index = None
                    return self._combine(payload)
                worker.running = payload
        except (EOFError, OSError):
            name = self.config.reward[worker.running]
            code = self._discard(worker, grace=1.0)
            return RewardResult(value=None, status="error", message=f"reward {name}: its process {pid} died ({code})")
        if time.monotonic() < worker.deadline:
            return None
        name = self.config.reward[worker.running]
        self._discard(worker)
        return RewardResult(
            value=None,
            status="timeout",
            message=f"reward {name} had not returned after {self.config.reward_timeout:g} s (--reward-timeout); "
            f"its process {pid} was killed",
        )

    def _combine(self, outcomes: list[tuple[str, float | None, str]]) -> RewardResult:
        for status, _, message in outcomes:
            if status != "ok":
                return RewardResult(value=None, status=status, message=message)
        components = tuple(value for _, value, _ in outcomes)
        total = sum(weight * value for weight, value in zip(self.config.weights, components, strict=True))
        if not math.isfinite(total):
            terms = [
                f"{name} {value:g} x {weight:g}"
                for name, value, weight in zip(self.config.reward, components, self.config.weights, strict=True)
            ]
            message = f"the weighted rewards ({', '.join(terms)}) add up to {total}, not to a finite number"
            return RewardResult(value=None, status="invalid", message=message)
        return RewardResult(value=total, status="ok", components=components)

    def _discard(self, worker: _Worker, *, grace: float = 0.0) -> str:
        self._workers.remove(worker)
        return _kill(worker, grace=grace)


def _start_worker(names: list[str]) -> _Worker:
    ours, theirs = Pipe(duplex=True)
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in DISTRIBUTED_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    search_path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
    arguments = [search_path, str(theirs.fileno()), str(os.getpid()), json.dumps(names)]
    process = subprocess.Popen(
        [sys.executable, "-c", BOOTSTRAP, *arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        env=environment,
        start_new_session=True,  # a process group of its own, killed with whatever the reward function started
    )
    theirs.close()  # the end of the pipe must be seen here when the worker dies
    return _Worker(process=process, connection=ours, deadline=time.monotonic() + START_LIMIT)


def _wait_for(workers: list[_Worker]) -> None:
    """Sleep until one of the workers has said something or is past its deadline."""
    until = min(worker.deadline for worker in workers) - time.monotonic()
    wait([worker.connection for worker in workers], timeout=max(0.0, until))


def _kill(worker: _Worker, *, grace: float = 0.0) -> str:
    """Kill the worker's process group, wait for the worker, and say how it ended.

    A worker whose pipe has just closed is given `grace` seconds to end by itself, so that its own exit code is seen.
    """
    worker.connection.close()
    give_up = time.monotonic() + grace
    # WNOWAIT leaves it unreaped: until it is reaped below, its process id cannot come to mean another group.
    while os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() >= give_up:
            break
        time.sleep(0.01)
    os.killpg(worker.process.pid, signal.SIGKILL)
    code = worker.process.wait()
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _stop_all(workers: list[_Worker], owner_pid: int) -> None:
    if os.getpid() != owner_pid:  # a forked copy of the pool owns no process
        return
    while workers:
        _kill(workers.pop())
