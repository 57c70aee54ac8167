"""Checkpoints of experts fit every expert-parallel size; see expert_checkpoint_ranks.py."""

from pathlib import Path

import pytest

from tests.support.ranks import run_on_ranks

pytestmark = [pytest.mark.ranks(seconds=30), pytest.mark.timeout(600)]  # seconds on a free machine, minutes on a busy one


def test_saved_at_one_size_and_gone_on_with_at_another(tmp_path):
    output = run_on_ranks(Path(__file__).with_name("expert_checkpoint_ranks.py"), 2, tmp_path, [str(tmp_path)])
    for check in ("weights", "saved at cp2 ep1", "saved at cp2 ep2", "saved at cp1 ep2", "bf16"):
        assert check in output.splitlines()
