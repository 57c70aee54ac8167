"""Processes and what is below them end, and leave no shared memory."""

import os
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest

from longstraw.rollout.lifetime import end_tree, list_shared_files, wait_for_end

ROOT = Path(__file__).resolve().parents[3]
PARENT = """
import os, signal, subprocess, sys, time
from multiprocessing import resource_tracker, shared_memory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
memory = shared_memory.SharedMemory(create=True, size=4096)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
print(memory.name, child.pid, flush=True)
time.sleep(100)
"""
CHILD = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from longstraw.rollout.lifetime import die_with_parent
die_with_parent(int(sys.argv[2]))
print("ready", flush=True)
time.sleep(100)
"""


def start(*arguments):
    return subprocess.Popen([sys.executable, "-c", *arguments], stdout=subprocess.PIPE, text=True)


def test_a_tree_that_ignores_sigterm_ends_and_its_shared_memory_goes():
    with start(PARENT) as process:
        name, child = process.stdout.readline().split()
        file = Path("/dev/shm") / name
        assert file.exists() and file in list_shared_files([psutil.Process(process.pid)])
        started = time.monotonic()
        end_tree([psutil.Process(process.pid)], grace=0.3)
        assert time.monotonic() - started < 10
        assert not psutil.pid_exists(process.pid)
    assert not file.exists() and not psutil.pid_exists(int(child))


def test_files_of_others_are_left_alone():
    own = shared_memory.SharedMemory(create=True, size=4096)
    try:
        with start("import time; time.sleep(100)") as process:
            end_tree([psutil.Process(process.pid)], grace=1.0)
        assert (Path("/dev/shm") / own.name).exists()
    finally:
        own.close()
        own.unlink()


@pytest.mark.parametrize("gone_before", [False, True])
def test_a_worker_dies_with_its_parent(gone_before):
    """Also where the parent was gone before it could ask."""
    middle = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {CHILD!r}, {str(ROOT)!r}, str({1 if gone_before else 'os.getpid()'})])\n"
        "print(child.pid, flush=True)\ntime.sleep(100)"
    )
    with start(middle) as process:
        child = psutil.Process(int(process.stdout.readline()))
        if not gone_before:
            assert process.stdout.readline() == "ready\n"
            process.kill()
        late = time.monotonic() + 20
        while time.monotonic() < late and child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.02)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
        process.kill()


def test_the_end_of_an_owner_is_seen():
    read, write = os.pipe()
    with start("import time; time.sleep(0.3)") as owner:
        assert wait_for_end(owner.pid, read) == f"its owner, process {owner.pid}, is gone"
        owner.wait()
        assert wait_for_end(owner.pid, read) == f"its owner, process {owner.pid}, is gone"
    os.write(write, b".")
    assert wait_for_end(0, read) == wait_for_end(os.getpid(), read) == "asked to"
