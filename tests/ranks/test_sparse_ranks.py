"""Selection and sparse attention over 4 and 2 ranks equal the naive form on the whole sequence; see sparse_ranks.py."""

from pathlib import Path

import pytest

from tests.support.ranks import run_on_ranks


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_sparse_attention_over_four_and_two_ranks(tmp_path):
    run_on_ranks(Path(__file__).parent / "sparse_ranks.py", 4, tmp_path)
