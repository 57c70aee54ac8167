"""Latent attention over context-parallel ranks: every parameter's gradient equals one dense pass of Megatron's DSAttention.

Two launches, of 2 and of 4 ranks, run the "latent" cases of engine_cases.py; each test here reads one result.
"""

from pathlib import Path

import pytest

from tests.ranks.engine_cases import LATENT_CASES
from tests.support.ranks import open_results

pytestmark = [pytest.mark.ranks(seconds=45), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """case name -> errors and losses."""
    return open_results(Path(__file__).parent / "engine_ranks.py", LATENT_CASES, ["latent"], tmp_path_factory)


@pytest.mark.parametrize("name", LATENT_CASES)
def test_gradient_equals_the_dense_pass(results, name):
    result, bar = results(name), LATENT_CASES[name].bar
    worst = max(result["parameters"], key=result["parameters"].get)
    assert result["global"] <= bar, (result["global"], worst)
    assert result["parameters"][worst] <= 10 * bar, (worst, result["parameters"][worst])
    assert result["loss"] == pytest.approx(result["reference_loss"], rel=10 * bar, abs=bar)
