"""Who sums which gradient when experts lie on other ranks, and the norm that clips it: on 2 and on 4 ranks."""

import json
from pathlib import Path

import pytest

from tests.support.ranks import run_on_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]  # seconds on a free machine, minutes on a busy one


@pytest.mark.parametrize("ranks, pairs", [(2, 4), (4, 2)])
def test_every_gradient_is_summed_once_and_counts_once(ranks, pairs, tmp_path):
    """Sums, norm and idle experts at every pair of context-parallel and expert-parallel sizes of two ranks, and at those of
    four where one axis is the longer."""
    script = Path(__file__).with_name("expert_gradients_ranks.py")
    run_on_ranks(script, ranks, tmp_path, [str(tmp_path / "done.json")])
    done = json.loads((tmp_path / "done.json").read_text())
    assert len(done) == 3 * pairs and {name.split()[0] for name in done} == {"check_sums", "check_norm", "check_idle_experts"}
