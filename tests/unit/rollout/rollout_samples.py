"""Steps of rollouts to write and to spoil."""

import os
import signal
from array import array

from longstraw.rollout.manifest import StepManifest
from longstraw.rollout.protocol import Sample
from longstraw.rollout.routes import RoutedExperts
from longstraw.rollout.store import StoredGroup


def make_sample(seed: int, length: int = 3, *, version: int = 1, routes: bool = False) -> Sample:
    experts = RoutedExperts(layers=(2, 4), topk=1, data=bytes(4 * length)) if routes else None
    return Sample(
        prompt_id=f"train.jsonl:{seed // 10}", token_ids=tuple(range(seed, seed + length)),
        logprobs=tuple(-0.1 * (seed + i) for i in range(length)), finish_reason="length" if length > 2 else "stop",
        weight_version=version, routes=experts,
    )  # fmt: skip


def make_group(place: int, index: int | None, *, version: int = 1, reward: float = 1.0, routes: bool = False) -> StoredGroup:
    """Two responses, of which the second has no reward."""
    samples = (make_sample(10 * place, 3, version=version, routes=routes), make_sample(10 * place + 5, 2, version=version))
    return StoredGroup(
        prompt_id=f"train.jsonl:{place}", prompt_token_ids=array("i", range(100, 104 + place)), samples=samples,
        rewards=(reward, 0.0), statuses=("ok", "timeout"), messages=("", "killed after 3 s"), kept=(True, False),
        group_index=index, attempt=0 if index is not None else 1, place=place,
    )  # fmt: skip


def make_manifest(step: int = 2, *, groups: int = 3, rows: int = 6, **changes) -> StepManifest:
    return StepManifest(**{
        "step": step, "weight_version": step - 1, "source": "resident", "settings": {"sampling_temperature": 0.7},
        "data_before": {"epoch": 0, "position": 3}, "data_after": {"epoch": 0, "position": 6}, "groups": groups,
        "rows": rows, **changes,
    })  # fmt: skip


def kill_at(function: str, call: int) -> None:
    """End this process by SIGKILL at the given call of an `os` function."""
    original, calls = getattr(os, function), []

    def deadly(*args, **kwargs):
        calls.append(None)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(os, function, deadly)
