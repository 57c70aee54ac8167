"""The settings: published defaults, a help text each, and refusals that name the flag."""

import ast
import inspect
from dataclasses import FrozenInstanceError, fields

import pytest

from longstraw.optim import LograConfig, config


def test_defaults_are_the_reference_values():
    settings = LograConfig()
    assert (settings.logra_rank, settings.logra_update_ratio, settings.logra_beta2) == (256, 6e-5, 0.95)
    assert (settings.kl_budget, settings.kl_budget_final, settings.kl_alpha_max) == (2e-4, 2e-5, 3.0)
    assert (settings.kl_probe_responses, settings.kl_probe_tokens) == (2, 4096)
    assert (settings.kl_mismatch_weight, settings.kl_budget_floor) == (0.3, 0.5)


def test_every_field_has_a_help_text():
    body = next(node for node in ast.parse(inspect.getsource(config)).body if isinstance(node, ast.ClassDef)).body
    documented = {
        field.target.id for field, text in zip(body, body[1:])
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }
    assert documented == {field.name for field in fields(LograConfig)}


def test_frozen_and_keyword_only():
    with pytest.raises(FrozenInstanceError):
        LograConfig().logra_rank = 3
    with pytest.raises(TypeError):
        LograConfig("dense")


@pytest.mark.parametrize("direction", ["dense", "sketch"])
@pytest.mark.parametrize("rule", ["sgd", "rowadam", "adam"])
@pytest.mark.parametrize("step_size", ["learning-rate", "update-ratio", "predicted-kl"])
def test_the_axes_are_independent(direction, rule, step_size):
    axes = dict(update_direction=direction, update_rule=rule, update_step_size=step_size)
    if (direction, rule) == ("sketch", "adam"):
        with pytest.raises(ValueError, match="--update-rule adam .* --update-direction"):
            LograConfig(**axes)
    else:
        LograConfig(**axes)


def test_draws():
    assert [LograConfig().draw(step) for step in range(3)] == [0, 1, 2]
    assert [LograConfig(logra_refresh=2).draw(step) for step in range(4)] == [0, 0, 1, 1]
    assert {LograConfig(logra_refresh=0).draw(step) for step in range(4)} == {0}


@pytest.mark.parametrize("change", [
    dict(logra_rank=0), dict(logra_refresh=-1), dict(logra_seed=2**63), dict(logra_seed=-1), dict(logra_delta_dir=""),
    dict(logra_cosine_of=""), dict(kl_budget=11.0), dict(logra_update_ratio=1.5), dict(logra_projection="uniform"),
    dict(logra_masters="none"), dict(logra_update_ratio=0.0), dict(logra_update_ratio=float("nan")),
    dict(logra_beta2=1.0), dict(logra_beta2=float("nan")),
    dict(kl_budget=-1e-4), dict(kl_budget=float("inf")), dict(kl_budget_final=0.0), dict(kl_budget_final=1e-3),
    dict(kl_budget_steps=0), dict(kl_alpha_max=0.0), dict(kl_probe="forward"), dict(kl_probe_scope="prompt"),
    dict(kl_probe_tokens=0), dict(kl_probe_responses=0), dict(kl_probe_step=0.0), dict(kl_mismatch_weight=0.0),
    dict(kl_budget_floor=1.5), dict(kl_refused_step="retry"), dict(update_rule="lion"),
])
def test_refuses_in_one_sentence_with_the_flag(change):
    (name,) = change
    with pytest.raises(ValueError) as caught:
        LograConfig(**change)
    text = str(caught.value)
    assert "--" + name.replace("_", "-") in text and text.endswith(".") and "\n" not in text
