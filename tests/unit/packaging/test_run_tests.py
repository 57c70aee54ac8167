"""tests/run.sh on a tree of its own: both parts run, their counts are added, and its exit status is the worse one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TESTS = """
import os, time
import pytest

def test_good(): pass
def test_bad(): assert "{bad}" == ""
@pytest.mark.ranks
def test_on_ranks(): assert os.environ["OMP_NUM_THREADS"] == "1"
@pytest.mark.ranks
def test_slow(): time.sleep({slow})
@pytest.mark.vllm
def test_engine(): pass
"""


@pytest.fixture
def run_tests(tmp_path):
    """Runs a copy of the script over the tests above; returns its exit status and its output's lines."""
    tree = tmp_path / "the tree"
    (tree / "tests").mkdir(parents=True)
    (tree / "tools").mkdir()
    for file in ("tests/run.sh", "tests/conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / file, tree / file)
    # The environment exists: it is this one.
    for name in ("setup_env.sh", "setup_vllm.sh"):
        (tree / "tools" / name).write_text("#!/bin/sh\n")
        (tree / "tools" / name).chmod(0o755)

    def run(*arguments: str, bad: str = "", slow: float = 0, seconds: int = 200, workers: int = 0):
        (tree / "tests/test_some.py").write_text(TESTS.format(bad=bad, slow=slow))
        environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "LONGSTRAW", "OMP"))}
        environ |= {"LONGSTRAW_VENV": sys.prefix, "LONGSTRAW_TEST_SECONDS": str(seconds), "LONGSTRAW_TEST_WORKERS": str(workers)}
        shown = subprocess.run([tree / "tests/run.sh", *arguments], cwd="/", capture_output=True, text=True, timeout=250,
                               env=environ)
        return shown.returncode, shown.stdout.splitlines(), shown.stderr

    return run


def test_both_parts_are_counted_arguments_are_pytests_and_one_failure_fails_the_whole(run_tests):
    status, lines, _ = run_tests("-k", "not slow", bad="x", workers=1)
    assert status == 1 and lines[-1] == "3 passed, 1 failed, 0 skipped"


def test_a_part_may_select_nothing_and_running_nothing_is_no_success(run_tests):
    status, lines, _ = run_tests("-k", "on_ranks")
    assert status == 0 and lines[-1] == "1 passed, 0 failed, 0 skipped"
    status, lines, _ = run_tests("-k", "no_such_test")
    assert status == 5 and lines[-1] == "0 passed, 0 failed, 0 skipped" and "no test ran" in lines[-2]


def test_the_whole_run_is_bounded(run_tests):
    """The first part selects nothing and the second hangs; on a busy machine the first may take all the time itself."""
    status, _, errors = run_tests("-k", "slow", slow=100, seconds=8)
    assert status == 124 and ("stopped after 8 s" in errors or "no time left" in errors)
