"""What every test shares: the thread and compile settings of a CPU run, and the count that tests/run.sh adds up."""

import json
import os

import pytest

# Set before anything imports torch, and inherited by the ranks that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    """Appends this run's counts to $LONGSTRAW_TEST_COUNTS, one JSON line; an xdist worker's are its controller's too."""
    path = os.environ.get("LONGSTRAW_TEST_COUNTS")
    if path and not hasattr(config, "workerinput"):
        counts = {kind: len(terminalreporter.stats.get(kind, [])) for kind in ("passed", "failed", "error", "skipped")}
        with open(path, "a") as file:
            file.write(json.dumps(counts) + "\n")
