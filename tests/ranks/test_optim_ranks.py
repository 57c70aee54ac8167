"""Sketches, row moments and predicted KL over 2 and 3 ranks equal one rank's; see optim_ranks.py."""

from pathlib import Path

import pytest

from tests.support.ranks import run_on_ranks


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 3])
def test_updates_over_ranks(ranks, tmp_path):
    run_on_ranks(Path(__file__).parent / "optim_ranks.py", ranks, tmp_path, seconds=280)
