"""What a step's gradient does to the weights, behind one interface for every optimizer.

The trainer calls, in this order and on every rank: `accumulating` around the replay, `take` once, `clear` whenever a step
has ended or is rolled back. `take` checks everything before the first weight moves.

`AdamUpdate` is Adam of all weights by Megatron's optimizer; `megatron.grpo.logra` has the other.
"""

from argparse import Namespace
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from megatron.core.optimizer import MegatronOptimizer

from longstraw.patches.finalize_model_grads import finalize_gradients
from longstraw.transaction.commit import StepRejected
from longstraw.transaction.group import PromptGroup
from megatron.grpo.optimizer import gradients_are_finite, name_nonfinite_gradients, optimizer_state, step_optimizer


class WeightUpdate(Protocol):
    """One way to update the weights."""

    states_kept: int
    """Of how many prompts, from the last replayed one back, `take` wants the states alive."""

    def accumulating(self, number: int) -> AbstractContextManager:
        """The block in which the backwards of step `number` (from 1) run."""

    def take(self, number: int, groups: Sequence[PromptGroup]) -> dict:
        """Sum the gradient over the ranks, check it, and move the weights -> the step's metrics. Collective.

        groups: this replica's. Raises StepRejected, on every rank and with nothing moved, where a check fails.
        """

    def describe_rest(self) -> dict:
        """The metrics of a step without gradient, which leaves the weights alone."""

    def clear(self) -> None:
        """Empty everything that a step accumulates."""

    def count_bytes(self) -> dict[str, int]:
        """Bytes of this rank that are always there: "gradients", "optimizer", and others."""


class AdamUpdate:
    """Adam over all trained weights."""

    states_kept = 0

    def __init__(self, args: Namespace, ddp, optimizer, scheduler, groups, adapters):
        self.args, self.ddp, self.optimizer, self.scheduler = args, ddp, optimizer, scheduler
        self.groups, self.adapters = groups, adapters

    def accumulating(self, number: int) -> AbstractContextManager:
        """Without a reduction after each backward."""
        return self.ddp.no_sync()

    def take(self, number: int, groups: Sequence[PromptGroup]) -> dict:
        """See `WeightUpdate`."""
        finalize_gradients(self.ddp, self.adapters, self.groups)
        check_finite(number, self.ddp, self.groups)
        learning_rate = self.optimizer.param_groups[0]["lr"]
        taken, norm = step_optimizer(self.optimizer, self.scheduler)
        if not taken:
            raise StepRejected(f"step {number}: the gradient's norm is {norm}")
        self.clear()
        return {"grad_norm": norm, "learning_rate": learning_rate}

    def describe_rest(self) -> dict:
        """See `WeightUpdate`."""
        return {"grad_norm": 0.0, "learning_rate": self.optimizer.param_groups[0]["lr"]}

    def clear(self) -> None:
        """Empty the buffers, and part `grad` from `main_grad`: the optimizer ties them together for its step, and a
        backward into tied gradients would count every gradient twice."""
        self.optimizer.zero_grad(set_to_none=True)
        self.ddp.zero_grad_buffer()

    def count_bytes(self) -> dict[str, int]:
        """See `WeightUpdate`."""
        return {
            "gradients": count_buffers(self.ddp), "optimizer": count_state(self.optimizer, self.ddp.module)
        }


def check_finite(number: int, ddp, groups) -> None:
    """Raise StepRejected, on every rank, naming the parameters whose gradient holds a NaN or an infinity."""
    if not gradients_are_finite(ddp, groups):
        names = name_nonfinite_gradients(ddp, groups)
        raise StepRejected(f"step {number}: the gradient of {', '.join(names[:5])} is not finite")


def count_state(optimizer: MegatronOptimizer, model: torch.nn.Module) -> int:
    """Bytes of Adam's state on this rank: moments, step counts, and the float32 weights where it keeps its own."""
    own, total = {parameter.data_ptr() for parameter in model.parameters()}, 0
    for weight, held in optimizer_state(optimizer).items():
        total += sum(value.nbytes for value in held.values() if torch.is_tensor(value))
        total += 0 if weight.data_ptr() in own else weight.nbytes
    return total


def count_buffers(ddp) -> int:
    """Bytes of DDP's gradient buffers on this rank."""
    return sum(buffer.grad_data.nbytes for buffer in ddp.buffers + ddp.expert_parallel_buffers)
