"""What every test shares: the thread and compile settings of a CPU run, the order of the tests that start ranks, and the
count that tests/run.sh adds up."""

import gc
import json
import os

import pytest

# Set before anything imports torch, and inherited by the ranks that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these tests are of the CPU's paths, also where there is a GPU: tests/gpu/run.sh


def pytest_addoption(parser):
    """--long takes in the tests that are marked so."""
    parser.addoption("--long", action="store_true", help="also run the tests that take long: up to an hour each")


def pytest_ignore_collect(collection_path, config):
    """A run of the tests that start ranks alone passes over the files that have none: most of them import Megatron."""
    ours = config.option.markexpr == "ranks" and collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if ours and "mark.ranks" not in collection_path.read_text() else None


def pytest_collection_modifyitems(config, items):
    """Tests marked `long` are left out without --long. Files with `ranks(seconds=...)` come in the order of these seconds,
    longest first, so that none is left alone at the end; then all others as they are."""
    left_out = [] if config.option.long else [item for item in items if item.get_closest_marker("long")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    seconds = {}
    for item in items:
        for marker in item.iter_markers("ranks"):
            seconds[item.path] = max(seconds.get(item.path, 0), marker.kwargs.get("seconds", 0))
    items.sort(key=lambda item: -seconds.get(item.path, 0))


def pytest_collection_finish():
    """What collection imported stays until the end: the garbage collector need not walk it again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    """Appends this run's counts to $LONGSTRAW_TEST_COUNTS, one JSON line; an xdist worker's are its controller's too."""
    path = os.environ.get("LONGSTRAW_TEST_COUNTS")
    if path and not hasattr(config, "workerinput"):
        counts = {kind: len(terminalreporter.stats.get(kind, [])) for kind in ("passed", "failed", "error", "skipped")}
        with open(path, "a") as file:
            file.write(json.dumps(counts) + "\n")
