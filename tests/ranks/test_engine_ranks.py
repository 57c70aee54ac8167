"""Over context, tensor, sequence and data parallel ranks every parameter's gradient equals one dense pass.

Two launches, of 2 and of 4 ranks, run all the cases of engine_cases.py; each test here reads one result.
"""

from pathlib import Path

import pytest

from tests.ranks.engine_cases import CASES
from tests.support.ranks import open_results

pytestmark = [pytest.mark.ranks(seconds=40), pytest.mark.timeout(600)]  # seconds on a free machine, minutes on a busy one
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """case name -> errors and losses."""
    return open_results(HERE / "engine_ranks.py", CASES, ["engine"], tmp_path_factory)


@pytest.mark.parametrize("name", CASES)
def test_gradient_equals_the_dense_pass(results, name):
    result, bar = results(name), CASES[name].bar
    worst = max(result["parameters"], key=result["parameters"].get)
    assert result["global"] <= bar, (result["global"], worst)
    assert result["parameters"][worst] <= 10 * bar, (worst, result["parameters"][worst])
    assert result["loss"] == pytest.approx(result["reference_loss"], rel=10 * bar, abs=bar)


def test_one_trained_token_of_eight_gives_one_loss_whatever_the_ranks(results):
    """Not off by the CP size, nor by a rank's share of the mask: CP 1 (data parallel 4), 2 and 4 report the same."""
    names = ["dp4, 8 tokens", "dp2 x cp2, 8 tokens", "cp2, 8 tokens", "cp4, 8 tokens"]
    losses = [results(name)["loss"] for name in names]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-12) and losses[0] != 0


def test_axes_right_alone_are_right_together(results):
    """TP 2, CP 2 and both: the gated delta nets' output norms, which need a sum over TP of their own, included."""
    for name, layers in (("tp2", 3), ("cp2", 3), ("tp2 x cp2", 3), ("tp2 x cp2, sequence parallel, odd", 2)):
        norms = {p: e for p, e in results(name)["parameters"].items() if p.endswith("out_norm.weight")}
        assert len(norms) == layers and max(norms.values()) <= 1e-11, (name, norms)
