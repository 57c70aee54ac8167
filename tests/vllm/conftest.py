"""The real vLLM, on this machine's CPU, in its own environment; and a loud word where there is none.

tools/setup_vllm.sh makes the environment. Where it cannot be made, each of these tests is skipped and the run's last lines
say what was not run.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from longstraw.rollout.vllm_client import Server, VllmEngine, launch_server, stop, wait_until_ready
from longstraw.rollout.vllm_client.process import find_vllm_python
from tests.support.ranks import REPOSITORY, run_forked, run_on_ranks

_START_SECONDS = 240


def _why_not() -> str:
    try:
        find_vllm_python()
    except ValueError as error:
        return str(error)
    return ""


def pytest_collection_modifyitems(items):
    """Skip what needs vLLM where there is none."""
    reason = _why_not()
    for item in items:
        if reason and item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.skip(reason=f"vLLM WAS NOT TESTED: {reason}"))


def pytest_terminal_summary(terminalreporter):
    """Say at the end what was not run."""
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if "vLLM WAS NOT TESTED" in str(r.longrepr)]
    if skipped:
        terminalreporter.section("vLLM WAS NOT TESTED", sep="!")
        terminalreporter.line(f"{len(skipped)} tests of tests/vllm did not run: {_why_not()}")


@dataclass(frozen=True)
class Running:
    """A server and a connection to it."""

    server: Server
    engine: VllmEngine


@pytest.fixture(scope="session")
def versions(tmp_path_factory) -> Path:
    """The --weight-sync-dirs of four short runs: full, delta, lora, merged (see make_versions.py)."""
    folder = tmp_path_factory.mktemp("versions")
    run_forked(
        REPOSITORY / "examples" / "recall" / "make_data.py",
        ["--output", folder / "data", "--prompt-tokens", 47, "--num-facts", 4, "--num-train", 16, "--num-eval", 3], folder,
    )
    run_on_ranks(Path(__file__).with_name("make_versions.py"), 2, folder, [str(folder)], seconds=280)
    return folder / "weights"


@pytest.fixture(scope="session")
def start_server(tmp_path_factory):
    """Starts servers, each with a connection; ends them all at the end."""
    started: list[Running] = []

    def start(*flags: str, owner_pid: int | None = None) -> Running:
        folder = tmp_path_factory.mktemp("server")
        server = launch_server([*flags, "--max-model-len", "512"], folder=folder, owner_pid=owner_pid)
        wait_until_ready(server, seconds=_START_SECONDS)
        started.append(Running(server, VllmEngine(server.ready_file, generate_seconds=60, sync_seconds=60)))
        return started[-1]

    yield start
    for running in started:
        running.engine.close()
        stop(running.server)
