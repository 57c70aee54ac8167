"""One host's share of a switch, in this process: what it kills and whose files it removes, whatever the disk and the clock
do."""

import os
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from longstraw.rollout.topology import node as module
from longstraw.rollout.topology.command import Command
from longstraw.rollout.topology.config import DeadlineConfig
from longstraw.rollout.topology.crew import Crew, StageFailed, find_last_words
from longstraw.rollout.topology.follower import clear_host
from longstraw.rollout.topology.hosts import LocalHost, StopAsked
from longstraw.rollout.topology.journal import Journal
from longstraw.rollout.topology.machine import Machine
from longstraw.rollout.topology.node import LocalNode, Order
from longstraw.rollout.topology.processes import Process, carries_mark, list_shared_memory, read_process
from longstraw.rollout.topology.states import State

HOLD = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
held = open(sys.argv[1], "x")
open(sys.argv[2], "w").close()
time.sleep(600)
"""


@pytest.fixture
def node(tmp_path):
    """A host whose trainer holds a file in /dev/shm and does not end on SIGTERM, and whose generator refuses its flags."""
    shared = f"/dev/shm/longstraw-test-{os.getpid()}-{time.monotonic_ns()}"
    programs = {
        "trainer": (sys.executable, "-I", "-S", "-c", HOLD, shared, str(tmp_path / "holds")),
        "generator": ("sh", "-c", "echo 'train: error: no such flag'; echo 'launch: rank 0 exited with 2'; exit 2"),
    }

    def build(role, step, ports):
        return Command(arguments=programs[role], log=tmp_path / f"{role}.log", environment=dict(os.environ))

    made = LocalNode(build=build, mark=f"test{time.monotonic_ns():x}", record=tmp_path / "switch/node-0.json")
    made.record.parent.mkdir()
    made.shared = Path(shared)
    yield made
    made.record.parent.mkdir(exist_ok=True)
    assert clear_host(made, 30) == []
    made.shared.unlink(missing_ok=True)


def wait_for(condition, what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def start_trainer(node: LocalNode, tmp_path: Path) -> None:
    node.obey(Order(do="start", role="trainer", step=1))
    wait_for((tmp_path / "holds").exists, "the trainer's file")


def test_a_clock_that_is_set_back_hides_no_file_of_ours(node, tmp_path, monkeypatch):
    monkeypatch.setattr(module.time, "time", lambda now=time.time: now() + 10.0)
    start_trainer(node, tmp_path)
    monkeypatch.undo()
    wait_for(lambda: node.tick() or str(node.shared) in node._shared, "the file among ours")
    assert clear_host(node, 30) == [] and not node.shared.exists()


def test_a_file_that_was_there_before_is_left(node, tmp_path):
    before = Path(f"{node.shared}-before")
    before.write_text("somebody's")
    try:
        start_trainer(node, tmp_path)
        assert not node._is_ours(str(before)) and node._is_ours(str(node.shared))
        before.unlink()
        before.write_text("another of that name")
        assert node._is_ours(str(before))
    finally:
        before.unlink()


def test_all_is_killed_where_the_record_cannot_be_written(node, tmp_path):
    start_trainer(node, tmp_path)
    running = node.commands["trainer"].process
    wait_for(lambda: node.tick() or str(node.shared) in node._shared, "the file among ours")
    os.rename(node.record.parent, tmp_path / "gone")  # every write fails
    node._seen[(1 << 21, 1)] = "something new to write"
    with pytest.raises(OSError):
        node._write_record()
    assert clear_host(node, 30) == [] and running.poll() is not None and not node.shared.exists()
    with pytest.raises(OSError):
        node.obey(Order(do="start", role="trainer", step=2))


@pytest.mark.parametrize("number, look", list(enumerate([
    read_process,
    lambda pid: list_shared_memory(Process(pid=pid, started=1, name="", parent=1, session=1, resident_bytes=0)),
    lambda pid: carries_mark(Process(pid=pid, started=1, name="", parent=1, session=1, resident_bytes=0), "mark"),
])))
def test_looking_at_processes_keeps_nothing_of_them(number, look):
    """A switcher sees hundreds of thousands go by."""
    beyond = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1 + 10_000 * number
    look(beyond)
    tracemalloc.start()
    for pid in range(beyond, beyond + 2000):
        assert not look(pid)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 10_000, grown


def test_two_signals_in_one_tick_do_not_wait(node, tmp_path):
    machine = Machine(
        None, Crew([LocalHost("node-0", node)]), Journal(tmp_path / "journal.jsonl"), DeadlineConfig(grace_seconds=300.0),
        signals=lambda: 2, say=lambda text: None,
    )
    start_trainer(node, tmp_path)
    asked = time.monotonic()
    with pytest.raises(StopAsked):
        machine._tick(State.TRAINING, 1)
    assert time.monotonic() - asked < 60 and not node.shared.exists()


def test_a_program_that_failed_is_quoted(node, tmp_path):
    crew = Crew([LocalHost("node-0", node)])
    crew.start("generator", 1, "first")
    with pytest.raises(StageFailed, match="ended with status 2 .* and says: train: error: no such flag$") as caught:
        wait_for(lambda: crew.require("generator", goal="it ended") and False, "the end")
    assert caught.value.hopeless
    log = tmp_path / "other.log"
    log.write_text("RuntimeError: the last line\n\n")
    assert find_last_words(log) == "RuntimeError: the last line" and find_last_words(tmp_path / "none") == ""
