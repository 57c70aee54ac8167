"""ObjectiveConfig: every guard has the input that trips it, every field has its help."""

import ast
import inspect
from dataclasses import FrozenInstanceError, fields

import pytest

from longstraw.objectives import ObjectiveConfig


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(group_size=0), ["--group-size", "1"]),
        (dict(group_filter_retries=-1), ["--group-filter-retries"]),
        (dict(logprob_chunk_tokens=0), ["--logprob-chunk-tokens"]),
        (dict(clip_range_low=-0.1), ["--clip-range-low"]),
        (dict(clip_range_low=1.1), ["--clip-range-low"]),
        (dict(clip_range_low=float("nan")), ["--clip-range-low"]),
        (dict(clip_range_high=-0.1), ["--clip-range-high"]),
        (dict(clip_range_high=float("inf")), ["--clip-range-high"]),
        (dict(kl_coefficient=-1.0), ["--kl-coefficient"]),
        (dict(kl_coefficient=float("nan")), ["--kl-coefficient"]),
        (dict(advantage_estimator="mean"), ["--advantage-estimator", "group, leave_one_out"]),
        (dict(importance_level="block"), ["--importance-level", "token, sequence"]),
        (dict(loss_aggregation="mean"), ["--loss-aggregation"]),
        (dict(kl_estimator="k4"), ["--kl-estimator", "k1, k2, k3"]),
        (dict(group_filter="some"), ["--group-filter"]),
        (dict(advantage_estimator="leave_one_out"), ["--advantage-estimator", "--no-advantage-std-normalization"]),
        (dict(loss_aggregation="group_constant"), ["--loss-aggregation", "--loss-constant"]),
        (dict(loss_aggregation="group_constant", loss_constant=0), ["--loss-aggregation", "--loss-constant"]),
        (dict(loss_constant=100), ["--loss-constant", "--loss-aggregation"]),
    ],
)
def test_refuses_in_one_sentence_naming_the_flags(settings, words):
    with pytest.raises(ValueError) as error:
        ObjectiveConfig(**settings)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_accepts_the_edges():
    ObjectiveConfig()
    ObjectiveConfig(group_size=2, clip_range_low=1.0, clip_range_high=0.0, group_filter_retries=0)
    ObjectiveConfig(advantage_estimator="leave_one_out", advantage_std_normalization=False)
    ObjectiveConfig(loss_aggregation="group_constant", loss_constant=1)


def test_is_frozen():
    with pytest.raises(FrozenInstanceError):
        ObjectiveConfig().group_size = 3


def test_every_field_has_help_that_argparse_can_print():
    body = ast.parse(inspect.getsource(ObjectiveConfig)).body[0].body
    helps = {
        field.target.id: text.value.value
        for field, text in zip(body, body[1:])
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    assert set(helps) == {field.name for field in fields(ObjectiveConfig)}
    assert not any("%" in text for text in helps.values())
