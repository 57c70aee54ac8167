"""Checkpoint conversion over two ranks; see conversion_ranks.py."""

from pathlib import Path

import pytest

from tests.support.ranks import run_on_ranks


@pytest.mark.ranks(seconds=30)
def test_conversion_on_two_ranks(tmp_path):
    script = Path(__file__).with_name("conversion_ranks.py")
    for ranks, part in ((1, "prepare"), (2, "convert"), (1, "compare")):
        run_on_ranks(script, ranks, tmp_path, [str(tmp_path), part])
