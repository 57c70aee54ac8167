"""benchmarks/predicted_kl.py: what it measures, and that a step taken to measure is taken back."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks.live_step import open_model, open_update  # noqa: E402
from benchmarks.predicted_kl import make_table, measure, parse_arguments, step_taken  # noqa: E402
from tests.support.models import one_rank  # noqa: E402

SMALL = "--prompt-length 17 --response-length 6 --group-size 2 --seeds 1"


def test_the_predicted_kl_is_measured_within_five_percent_at_the_smallest_budget():
    one_rank()
    found = measure(parse_arguments(SMALL.split()), "float64", 1)
    first, last = found["steps"][0], found["steps"][-1]
    assert found["contexts"] == 12 and first["delta"] == 1e-5 and last["delta"] == 1e-3
    assert first["kl_predicted"] == pytest.approx(1e-5, rel=1e-9) and first["kappa"] == pytest.approx(1.0, abs=0.05)
    assert abs(first["kappa"] - 1) < abs(last["kappa"] - 1)  # the third order's share grows with the step
    assert found["rate_finite_difference_over_jvp"]["0.05"] == pytest.approx(1.0, abs=0.01)
    assert found["rate_by_program_over_jvp"] == pytest.approx(1.0, abs=0.01)
    assert found["rate_full"] > 0 and first["kl_measured_full"] > 0
    assert make_table([{"dtype": "float64", "seed": 1} | found]).count("\n") == 4


def test_a_step_taken_to_measure_is_taken_back():
    one_rank()
    flags = "--model-preset tiny-qwen3.6 --optimizer logra --logra-rank 4 --group-size 2 --max-response-length 2"
    live = open_update(open_model(flags))
    live.accumulate(1, live.sample_group(prompt_length=5))
    logra = live.update.logra
    direction = logra.prepare()
    before = {name: value.detach().clone() for name, value in live.opened.model.named_parameters()}
    moments = [weight.moment.clone() for weight in logra.weights]
    with step_taken(logra, direction.eta):
        assert any(not torch.equal(value, before[name]) for name, value in live.opened.model.named_parameters())
    assert all(torch.equal(value, before[name]) for name, value in live.opened.model.named_parameters())
    assert all(torch.equal(weight.moment, moment) for weight, moment in zip(logra.weights, moments))
    assert logra.steps_taken == 0 and logra.prepare() == direction


@pytest.mark.parametrize("bad, sentence", [
    ("--model-preset tiny-glm5.2", "forward mode does not go through its experts"),
    ("--deltas 0", "--deltas must be above 0 and finite"),
    ("--group-size 1", "--group-size is at least 2"),
])
def test_bad_flags_get_a_sentence(bad, sentence, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(bad.split())
    assert sentence in capsys.readouterr().err
