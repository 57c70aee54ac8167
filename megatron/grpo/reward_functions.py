"""The built-in reward functions, and how a name becomes a function.

A reward function is `reward(prompt: str, response: str, answer: str, extra: dict) -> float`. It runs in a worker
process (`reward_worker`), in that process's main thread, so libraries that use signals for their own time limits
(math-verify does) work there.

Left out: verl's `compute_score` signature, and reward models.
"""

import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

RewardFunction = Callable[[str, str, str, dict[str, Any]], float]


def resolve_reward(name: str) -> RewardFunction:
    """Find the reward function that a name stands for, importing what it needs.

    Args:
        name: a built-in name, `package.module:function`, or `path/to/file.py:function`.

    Raises:
        ValueError: there is no such function, its module cannot be imported, or it does not take
            (prompt, response, answer, extra).
    """
    if name in BUILTIN_REWARDS:
        return BUILTIN_REWARDS[name]()
    location, separator, attribute = name.rpartition(":")
    if not separator or not location or not attribute:
        raise ValueError(
            f"--reward {name}: not a built-in reward ({', '.join(BUILTIN_REWARDS)}), and not of the form "
            "package.module:function or path/to/file.py:function"
        )
    try:
        module = _import_file(Path(location)) if location.endswith(".py") else importlib.import_module(location)
    except Exception as error:  # importing user code may raise anything; the cause stays chained
        raise ValueError(f"--reward {name}: cannot import {location} ({type(error).__name__}: {error})") from error
    function = getattr(module, attribute, None)
    if function is None:
        raise ValueError(f"--reward {name}: {location} has no `{attribute}`")
    _check_signature(name, function)
    return function


def exact_match(prompt: str, response: str, answer: str, extra: dict[str, Any]) -> float:
    """1.0 if response and answer are equal once surrounding and repeated white space is normalised, else 0.0."""
    return float(response.split() == answer.split())


def load_math_verify() -> RewardFunction:
    """The math_verify reward: 1.0 if the last answer found in the response equals `answer` as mathematics, else 0.0.

    `answer` may be bare LaTeX or a number (`\\frac{1}{2}`, `34`), or carry its own `$...$` or `\\boxed{}`. The
    response is searched for LaTeX and for plain expressions, as math-verify does by default.
    """
    from math_verify import parse, verify

    def math_verify(prompt: str, response: str, answer: str, extra: dict[str, Any]) -> float:
        delimited = answer if "$" in answer or "\\boxed" in answer or "\\[" in answer else f"${answer}$"
        gold = parse(delimited)
        if not gold:
            raise ValueError(f"math-verify cannot read the answer {answer!r}")
        return float(verify(gold, parse(response)))

    return math_verify


def load_reasoning_gym() -> RewardFunction:
    """The reasoning_gym reward: the data set's own `score_answer`, usually from 0.0 to 1.0.

    `extra["reasoning_gym"]` is a dict, or its JSON text, with `dataset` (name), `config` (keyword arguments of
    `create_dataset`, optional) and `entry` (question, answer, metadata). As JSON text it survives formats that give
    all rows one schema. What is scored is the text of the last `<answer>...</answer>`, or the whole response,
    stripped, where there is none.
    """
    import reasoning_gym
    from reasoning_gym.utils import extract_answer

    datasets: dict[str, Any] = {}

    def reasoning_gym_reward(prompt: str, response: str, answer: str, extra: dict[str, Any]) -> float:
        if "reasoning_gym" not in extra:
            raise ValueError("the row has no `reasoning_gym` column, which names the data set and holds its entry")
        task = extra["reasoning_gym"]
        task = json.loads(task) if isinstance(task, str) else task
        config = task.get("config") or {}
        key = json.dumps([task["dataset"], config], sort_keys=True)
        if key not in datasets:
            datasets[key] = reasoning_gym.create_dataset(task["dataset"], **config)
        tagged = extract_answer(response)
        return datasets[key].score_answer(answer=response.strip() if tagged is None else tagged, entry=task["entry"])

    return reasoning_gym_reward


BUILTIN_REWARDS: dict[str, Callable[[], RewardFunction]] = {
    "exact_match": lambda: exact_match,
    "math_verify": load_math_verify,
    "reasoning_gym": load_reasoning_gym,
}
"""Each built-in name with what loads it; a loader imports its library, so only the rewards in use cost anything."""


def _import_file(path: Path):
    if not path.exists():
        raise FileNotFoundError(f"no file {path.absolute()}")
    module_name = f"longstraw_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look a class's module up there
    spec.loader.exec_module(module)
    return module


def _check_signature(name: str, function: Any) -> None:
    if not callable(function):
        raise ValueError(f"--reward {name}: is a {type(function).__name__}, not a function")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"--reward {name}: is an async function; a reward function returns its number directly")
    try:
        inspect.signature(function).bind("prompt", "response", "answer", {})
    except TypeError as error:
        raise ValueError(f"--reward {name}: must take (prompt, response, answer, extra), but: {error}") from error
