"""Low-rank pairs over two ranks; see lora_ranks.py."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import REPOSITORY, run_on_ranks


@pytest.mark.ranks(seconds=90)
@pytest.mark.timeout(600)
def test_low_rank_pairs(tmp_path):
    make_data = REPOSITORY / "examples" / "recall" / "make_data.py"
    subprocess.run(
        [sys.executable, str(make_data), "--output", str(tmp_path / "data"), "--prompt-tokens", "47", "--num-facts", "4",
         "--num-train", "16", "--num-eval", "3"],
        check=True, timeout=120, capture_output=True,
    )
    output = run_on_ranks(Path(__file__).with_name("lora_ranks.py"), 2, tmp_path, [str(tmp_path)])
    assert output.count("passed: ") == 12, output
