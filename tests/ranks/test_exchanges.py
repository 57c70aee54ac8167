"""Collectives are counted as they are made: as many as torch's dispatcher sees, with the bytes that they move."""

from pathlib import Path

import pytest

from tests.support.ranks import run_on_ranks

pytestmark = [pytest.mark.ranks(seconds=10), pytest.mark.timeout(300)]


def test_every_collective_is_counted_and_objects_are_not(tmp_path):
    run_on_ranks(Path(__file__).with_name("exchange_ranks.py"), 2, tmp_path, [], seconds=200)
