"""Log-probabilities with the vocabulary split over two gloo ranks equal those of one rank, float64."""

from pathlib import Path

import pytest

from tests.support.ranks import run_on_ranks


@pytest.mark.ranks
def test_two_ranks_equal_one(tmp_path):
    run_on_ranks(Path(__file__).with_name("vocab_parallel_ranks.py"), 2, tmp_path, seconds=240)
