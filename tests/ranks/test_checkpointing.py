"""Checkpoints at several topologies: see checkpointing_ranks.py."""

from pathlib import Path

import pytest

from tests.support.ranks import run_on_ranks

HERE = Path(__file__).parent


@pytest.mark.ranks(seconds=30)
@pytest.mark.timeout(600)  # 42 s of processor time; a busy disk takes longer
def test_checkpoints_over_two_ranks(tmp_path):
    output = run_on_ranks(HERE / "checkpointing_ranks.py", 2, tmp_path, [str(tmp_path)], seconds=560)
    assert output.count("passed: ") == 14, output


@pytest.mark.ranks
def test_runs_killed_while_saving(tmp_path):
    output = run_on_ranks(HERE / "killed_saves.py", 1, tmp_path, [str(tmp_path / "save")])
    assert output.count("passed: ") == 9, output
