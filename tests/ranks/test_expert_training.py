"""The training program on models with experts, whole runs on 2 gloo ranks: see expert_training_ranks.py."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import REPOSITORY, run_on_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]


def test_whole_runs(tmp_path):
    """Every check in one launch."""
    make_data = REPOSITORY / "examples" / "recall" / "make_data.py"
    subprocess.run(
        [sys.executable, str(make_data), "--output", str(tmp_path / "data"), "--prompt-tokens", "47", "--num-facts", "4",
         "--num-train", "16", "--num-eval", "3"],
        check=True, timeout=120, capture_output=True,
    )
    run_on_ranks(Path(__file__).with_name("expert_training_ranks.py"), 2, tmp_path, [str(tmp_path)], seconds=850)
