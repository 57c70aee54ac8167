"""Training from a rollout store, whole runs on 2 gloo ranks: bit for bit what the run that wrote it did."""

from pathlib import Path

import pytest

from tests.support.ranks import REPOSITORY, run_forked, run_on_ranks

pytestmark = [pytest.mark.ranks(seconds=90), pytest.mark.timeout(900)]


def test_store_and_replay(tmp_path):
    """Every scenario of rollout_store_ranks.py, in one launch."""
    run_forked(
        REPOSITORY / "examples" / "recall" / "make_data.py",
        ["--output", tmp_path / "data", "--prompt-tokens", 47, "--num-facts", 4, "--num-train", 16, "--num-eval", 3], tmp_path,
    )
    run_on_ranks(Path(__file__).with_name("rollout_store_ranks.py"), 2, tmp_path, [str(tmp_path)], seconds=850)
