"""Roll back and refuse: the snapshot puts back what it took, and the checks name what they saw."""

import pytest
import torch

from longstraw.transaction.commit import StepSnapshot, agree_on_failure, check_loss
from tests.support.models import one_rank


def test_a_snapshot_puts_everything_back():
    state, generator = {"position": 3}, torch.Generator().manual_seed(5)
    snapshot = StepSnapshot(
        (lambda: dict(state), state.update), (lambda: generator.get_state().clone(), generator.set_state)
    )
    drawn = torch.rand(4, generator=generator)
    state["position"] = 9
    snapshot.restore()
    assert state == {"position": 3} and torch.equal(torch.rand(4, generator=generator), drawn)


@pytest.mark.parametrize(
    "loss, nan_logprobs, message",
    [(0.3, 0, ""), (float("nan"), 0, "the loss is nan"), (float("-inf"), 0, "the loss is -inf"),
     (0.3, 2, "2 log-probabilities are NaN")],
)  # fmt: skip
def test_the_loss_is_checked(loss, nan_logprobs, message):
    assert check_loss(loss, nan_logprobs) == message


def test_one_rank_agrees_with_itself():
    groups = one_rank()
    assert agree_on_failure("", groups.tp) == "" and agree_on_failure("no", groups.tp) == "no"
