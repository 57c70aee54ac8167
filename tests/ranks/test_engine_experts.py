"""Experts over context-parallel ranks, over data-parallel replicas and over both: every gradient equals one dense pass.

The conventional model is whole on every rank; the stateful one gets its weights, expert by expert. Replicas that share
experts have prompts of different length, so that they only agree because they run in step.
"""

from pathlib import Path

import pytest

from tests.ranks.engine_cases import EXPERT_CASES
from tests.support.ranks import open_results

pytestmark = [pytest.mark.ranks(seconds=45), pytest.mark.timeout(600)]  # seconds on a free machine, minutes on a busy one
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """case name -> errors and losses."""
    return open_results(HERE / "engine_ranks.py", EXPERT_CASES, ["experts"], tmp_path_factory)


@pytest.mark.parametrize("name", EXPERT_CASES)
def test_gradient_equals_the_dense_pass(results, name):
    result, bar = results(name), EXPERT_CASES[name].bar
    worst = max(result["parameters"], key=result["parameters"].get)
    assert result["global"] <= bar, (result["global"], worst)
    assert result["parameters"][worst] <= 10 * bar, (worst, result["parameters"][worst])
    assert result["loss"] == pytest.approx(result["reference_loss"], rel=10 * bar, abs=bar)


@pytest.mark.parametrize("name", ["cp2 ep2, scored and replayed in one go", "dp2 x cp2 ep4", "cp4 ep2"])
def test_every_expert_and_router_is_compared(results, name):
    """All 8 experts of both layers under their whole names, and the routers, whose gradient comes from live gates."""
    parameters = results(name)["parameters"]
    for layer in range(2):
        assert f"decoder.layers.{layer}.mlp.router.weight" in parameters
        for expert in range(8):
            assert f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight" in parameters
