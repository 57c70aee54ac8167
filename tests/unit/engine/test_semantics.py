"""`response_only` treats the prompt's state as a constant: equal to a dense pass with that state detached."""

import pytest

from tests.support.dense import compare_gradients, constant_prompt, dense_gradients
from tests.support.models import dense_of, draw_group, get_pair, get_small_hybrid, lift_float64, replay_gradients


def detached_dense(pair, group):
    with lift_float64(), constant_prompt(pair.plain, group.prompt.shape[1] - 1):
        return dense_gradients(pair.plain, group.sequences(), vocab_size=pair.vocab_size)


@pytest.mark.parametrize("prompt", [1, 2, 30])
@pytest.mark.parametrize("together", [1, 2])
def test_response_only_equals_a_dense_pass_with_a_detached_prompt(prompt, together):
    pair = get_small_hybrid()
    group = draw_group(prompt, (6, 6), pair.vocab_size)
    loss, found = replay_gradients(pair.engine(semantics="response_only", response_block_size=4), group.tree(together=together))
    expected_loss, expected = detached_dense(pair, group)
    assert compare_gradients(found, expected)[0] <= 1e-12
    assert loss == pytest.approx(expected_loss, rel=1e-12)


@pytest.mark.parametrize("preset", ["tiny-qwen3.6", "tiny-llama"])
def test_response_only_of_presets(preset):
    pair = get_pair(preset)
    group = draw_group(43, (5, 1), pair.vocab_size)
    _, found = replay_gradients(pair.engine(semantics="response_only"), group.tree())
    assert compare_gradients(found, detached_dense(pair, group)[1])[0] <= 1e-12


def test_response_only_is_not_exact():
    """The same loss, another gradient: the distance that the mode's name stands for."""
    pair = get_small_hybrid()
    group = draw_group(30, (6, 6), pair.vocab_size)
    exact_loss, exact = replay_gradients(pair.engine(), group.tree())
    loss, found = replay_gradients(pair.engine(semantics="response_only"), group.tree())
    assert loss == pytest.approx(exact_loss, rel=1e-12)
    assert compare_gradients(found, exact)[0] > 0.05


def test_the_detached_oracle_is_the_dense_pass_where_nothing_is_detached():
    """The oracle's hooks themselves: with 0 constant tokens they change no bit, and they undo themselves."""
    pair = get_small_hybrid()
    group = draw_group(9, (4,), pair.vocab_size)
    with lift_float64(), constant_prompt(pair.plain, 0):
        _, hooked = dense_gradients(pair.plain, group.sequences(), vocab_size=pair.vocab_size)
    with lift_float64():
        _, after = dense_gradients(pair.plain, group.sequences(), vocab_size=pair.vocab_size)
    expected = dense_of(pair, group)[1]
    assert compare_gradients(hooked, expected)[0] <= 1e-15
    assert compare_gradients(after, expected)[0] == 0


def test_response_only_runs_no_reverse_sweep_of_the_prompt(monkeypatch):
    pair = get_small_hybrid()
    group, reversed_segments = draw_group(20, (5, 3), pair.vocab_size), []
    for semantics in ("exact", "response_only"):
        engine = pair.engine(semantics=semantics)
        original = engine.reverse_sweep
        monkeypatch.setattr(engine, "reverse_sweep", lambda s, state: reversed_segments.append(s.name) or original(s, state))
        replay_gradients(engine, group.tree())
    assert reversed_segments == ["response0", "response1", "prompt", "response0", "response1"]
