"""The training program on rollouts of a real vLLM that follows its weights, from their store, and generation alone."""

from pathlib import Path

import pytest

from longstraw.rollout.weight_folder import version_folder
from tests.support.ranks import run_on_ranks

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_training_on_an_engine(start_server, versions):
    """Every scenario of engine_training.py; the server begins without weights."""
    running = start_server("--model", str(version_folder(versions / "full", 0)), "--await-sync")
    arguments = [str(versions.parent), str(running.server.ready_file)]
    run_on_ranks(Path(__file__).with_name("engine_training.py"), 2, versions.parent, arguments, seconds=400)
