"""Commit or roll back: what a step could change besides gradients, and how ranks agree on the outcome.

Weights, moments and the schedule change only in the optimizer's step, after every check has passed on all ranks
together. Until then a step has used random numbers and moved the data position; `StepSnapshot` puts those back.
"""

import math
from collections.abc import Callable

import torch.distributed as dist


class StepRejected(Exception):
    """A check failed: the step is rolled back. The message names the check."""


class StepSnapshot:
    """State to return to if the step does not commit: the values that each (get, put) pair gave when this was made."""

    def __init__(self, *parts: tuple[Callable[[], object], Callable[[object], None]]):
        self._parts = [(put, get()) for get, put in parts]

    def restore(self) -> None:
        """Put everything back as it was."""
        for put, value in self._parts:
            put(value)


def agree_on_failure(message: str, group: dist.ProcessGroup) -> str:
    """Every rank's verdict (an empty message is a pass) -> the first failing rank's message, on all; "" if all pass."""
    verdicts: list[str] = [""] * group.size()
    dist.all_gather_object(verdicts, message, group=group)
    return next((verdict for verdict in verdicts if verdict), "")


def check_loss(loss: float, nan_logprobs: int) -> str:
    """A message where the loss or a trained token's log-probability is not a finite number, else ""."""
    if nan_logprobs:
        return f"{nan_logprobs} log-probabilities are NaN"
    return "" if math.isfinite(loss) else f"the loss is {loss}"
