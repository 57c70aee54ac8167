import json
import math

import pytest

from megatron.grpo.reward_functions import exact_match, load_math_verify, load_reasoning_gym, resolve_reward
from megatron.grpo.rewards import (
    RewardConfig,
    RewardFailure,
    RewardResult,
    apply_failure_policy,
    count_statuses,
)


def ok(value):
    return RewardResult(value=value, status="ok", components=(value,))


FAILED = RewardResult(value=None, status="timeout", message="reward f had not returned")


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"reward": []}, "--reward "),
        ({"reward": ["a:b", "c:d"], "reward_weights": [1.0]}, "--reward-weights"),
        ({"reward_weights": [math.nan]}, "--reward-weights"),
        ({"reward_timeout": 0.0}, "--reward-timeout"),
        ({"reward_timeout": math.inf}, "--reward-timeout"),
        ({"reward_workers": 0}, "--reward-workers"),
        ({"reward_failure": "ignore"}, "--reward-failure"),
    ],
)
def test_config_refuses_by_flag(settings, flag):
    with pytest.raises(ValueError, match=flag):
        RewardConfig(**settings)


def test_weights_default_to_one_each():
    assert RewardConfig(reward=["a:b", "c:d"]).weights == [1.0, 1.0]
    assert RewardConfig(reward=["a:b"], reward_weights=[0.5]).weights == [0.5]


def test_failure_policies():
    results = [ok(1.0), FAILED, ok(0.25)]
    assert apply_failure_policy(results, "zero") == ([1.0, 0.0, 0.25], [True, True, True])
    assert apply_failure_policy(results, "mask") == ([1.0, 0.0, 0.25], [True, False, True])
    with pytest.raises(RewardFailure, match="1 of 3 samples .* sample 1: timeout: reward f"):
        apply_failure_policy(results, "stop")
    assert apply_failure_policy([ok(0.5)], "stop") == ([0.5], [True])
    assert count_statuses(results) == {"ok": 2, "timeout": 1, "error": 0, "invalid": 0}


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [("v12", "v12", 1.0), ("  v12\n", "v12", 1.0), ("v1  v2", "v1 v2", 1.0), ("v1v2", "v1 v2", 0.0), ("", "v12", 0.0)],
)
def test_exact_match(response, answer, value):
    assert exact_match("", response, answer, {}) == value


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [
        (r"The answer is \boxed{0.5}.", r"\frac{1}{2}", 1.0),
        ("Answer: 34", "34", 1.0),
        ("Answer: 35", "34", 0.0),
        (r"$x = \frac{2}{4}$", r"$\frac12$", 1.0),
        (r"\boxed{\sqrt{8}}", r"\boxed{2\sqrt{2}}", 1.0),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1.0),  # bare LaTeX, which parses as 2 unless it is delimited
        ("It is 2.", r"2\sqrt{2}", 0.0),
        ("I do not know", "34", 0.0),
        ("", "34", 0.0),
    ],
)
def test_math_verify(response, answer, value):
    assert load_math_verify()("", response, answer, {}) == value


def test_math_verify_names_an_unreadable_answer():
    with pytest.raises(ValueError, match="cannot read the answer"):
        load_math_verify()("", "1", "", {})


def test_reasoning_gym_scores_as_the_data_set_does():
    entry = {"question": "7 + 5 =", "answer": "12", "metadata": {}}
    task = {"dataset": "chain_sum", "config": {"max_terms": 2}, "entry": entry}
    score = load_reasoning_gym()
    for extra in ({"reasoning_gym": task}, {"reasoning_gym": json.dumps(task)}):
        assert score("", " 12\n", "12", extra) == 1.0
        assert score("", "I add. <answer>+12.0</answer>", "12", extra) == 1.0
        assert score("", "13", "12", extra) == 0.0
        assert score("", "it is 12", "12", extra) == 2 / len("it is 12")  # chain_sum's own partial credit
    with pytest.raises(ValueError, match="no `reasoning_gym` column"):
        score("", "12", "12", {})


def test_resolve_by_module_and_by_file(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def half(prompt, response, answer, extra):\n    return 0.5\n")
    assert resolve_reward(f"{tmp_path}/my_rewards.py:half")("", "", "", {}) == 0.5
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_reward("my_rewards:half")("", "", "", {}) == 0.5
    monkeypatch.chdir(tmp_path)
    assert resolve_reward("my_rewards.py:half")("", "", "", {}) == 0.5


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("exact", "not a built-in reward .exact_match, math_verify, reasoning_gym."),
        ("module:", "not a built-in reward"),
        ("no_such_module:reward", "cannot import no_such_module"),
        ("no/such/file.py:reward", "cannot import no/such/file.py .*no file"),
        ("{file}:missing", "has no `missing`"),
        ("{file}:NOT_A_FUNCTION", "is a int, not a function"),
        ("{file}:coroutine", "is an async function"),
        ("{file}:too_few", r"must take \(prompt, response, answer, extra\)"),
    ],
)
def test_resolve_refuses_with_the_name(name, sentence, request):
    name = name.format(file=request.path.parent / "sample_rewards.py")
    with pytest.raises(ValueError, match=sentence) as refusal:
        resolve_reward(name)
    assert name in str(refusal.value)
