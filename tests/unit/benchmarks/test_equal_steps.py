"""The systems that benchmarks/run.sh compares take the same step: gradients of TRL, PrefixGrouper and LongStraw against the
dense gradient of transformers' model, float32, and what each makes of the weights.

TRL and PrefixGrouper are in requirements/benchmarks.txt, which tools/setup_env.sh installs; without them these tests fail.
"""

import json
from pathlib import Path

import pytest

from benchmarks.points import SYSTEMS
from tests.support.ranks import run_forked

pytestmark = pytest.mark.ranks(seconds=30)
PRESETS = ("tiny-llama", "tiny-qwen3")


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> dict[str, dict[str, dict[str, float]]]:
    """Preset -> system -> what equal_steps.py found."""
    scratch = tmp_path_factory.mktemp("equal_steps")
    run_forked(Path(__file__).with_name("equal_steps.py"), [str(scratch), *PRESETS], scratch, seconds=280)
    return json.loads((scratch / "errors.json").read_text())


@pytest.mark.parametrize("preset", PRESETS)
def test_all_but_the_approximation_have_the_dense_gradient(errors, preset):
    found = {system: figures["gradient"] for system, figures in errors[preset].items() if system != "dense"}
    assert found.pop("response_only") > 0.1
    assert len(found) == len(SYSTEMS) - 1 and max(found.values()) < 2e-6, found


@pytest.mark.parametrize("preset", PRESETS)
def test_they_move_the_weights_alike(errors, preset):
    """The second step's gradient is taken at weights that the first step has moved: by so much that it shows."""
    moved = errors[preset]["dense"]["moved"]
    found = {system: figures["second_gradient"] for system, figures in errors[preset].items() if "second_gradient" in figures}
    assert found.pop("response_only") > 0.1
    assert moved > 0.1 and len(found) == len(SYSTEMS) - 1 and max(found.values()) < 1e-4, (moved, found)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_comparison_is_not_blind(errors, preset):
    """Advantages of another order give another gradient, in TRL as in PrefixGrouper."""
    assert errors[preset]["trl"]["other_advantages"] > 0.1 and errors[preset]["prefix_grouper"]["other_advantages"] > 0.1
