"""Start, optimizer and end of a run: see one_rank_run.py."""

from pathlib import Path

import pytest

from tests.support.ranks import run_on_ranks

HERE = Path(__file__).parent


@pytest.mark.ranks
def test_start_optimizer_and_end_of_a_run(tmp_path):
    output = run_on_ranks(HERE / "one_rank_run.py", 1, tmp_path, [str(tmp_path / "runs")])
    assert output.count("passed: ") == 5, output
