"""LoGRA on two ranks: sketches against dense gradients at CP, TP and EP 2, and whole runs of the program."""

from pathlib import Path

import pytest

from tests.support.ranks import REPOSITORY, run_forked, run_on_ranks

pytestmark = [pytest.mark.ranks(seconds=130), pytest.mark.timeout(900)]


def test_sketches_and_runs(tmp_path):
    """Every check of logra_ranks.py, in one launch."""
    run_forked(
        REPOSITORY / "examples" / "recall" / "make_data.py",
        ["--output", tmp_path / "data", "--prompt-tokens", 47, "--num-facts", 4, "--num-train", 16, "--num-eval", 3], tmp_path,
    )
    run_on_ranks(Path(__file__).with_name("logra_ranks.py"), 2, tmp_path, [str(tmp_path)], seconds=850)
