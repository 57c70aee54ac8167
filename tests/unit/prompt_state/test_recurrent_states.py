"""Boundary states of gated delta net layers and their adjoints."""

import pytest
import torch

from longstraw.prompt_state.recurrent import GatedDeltaState, RecurrentStates


def draw(batch=1, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    recurrent = torch.randn(batch, 2, 3, 4, generator=generator)
    return GatedDeltaState(recurrent, torch.randn(batch, 5, 3, generator=generator).to(dtype))


def open_states():
    return RecurrentStates(segment="prompt", layer_number=3, owner=1)


def test_kept_states_are_copies():
    """A conv state is a view of a whole block's conv input: keeping the view would keep the block."""
    states, block_input = open_states(), torch.randn(1, 5, 1000, requires_grad=True) * 1
    states.keep(1, GatedDeltaState(draw().recurrent, block_input[..., -3:]))
    kept = states.at(1).conv
    assert kept.untyped_storage().nbytes() == 5 * 3 * 4 and kept.grad_fn is None
    assert torch.equal(kept, block_input[..., -3:])


def test_released_states_are_gone():
    states = open_states()
    states.keep(1, draw())
    states.release(1)
    states.release(1)
    with pytest.raises(KeyError):
        states.at(1)


def test_adjoints_sum_over_followers_and_their_batch():
    """A state of batch 1 shared by a batch: its adjoint is the sum over the batch, in float32."""
    states = open_states()
    states.keep(1, draw(dtype=torch.bfloat16))
    single, shared = draw(seed=1, dtype=torch.bfloat16), draw(batch=3, seed=2, dtype=torch.bfloat16)
    states.add_adjoint(single)
    states.add_adjoint(shared)
    assert states.adjoint.conv.dtype is torch.float32
    torch.testing.assert_close(states.adjoint.recurrent, single.recurrent + shared.recurrent.sum(0, keepdim=True))
    torch.testing.assert_close(states.adjoint.conv, single.conv.float() + shared.conv.float().sum(0, keepdim=True))


def test_adjoints_of_a_batch_stay_per_member():
    states = open_states()
    states.keep(1, draw(batch=3))
    first, second = draw(batch=3, seed=1), draw(batch=3, seed=2)
    states.add_adjoint(first)
    states.add_adjoint(second)
    torch.testing.assert_close(states.adjoint.recurrent, first.recurrent + second.recurrent)


def test_small_conv_adjoints_are_not_lost_in_bfloat16():
    states = open_states()
    states.keep(1, draw(dtype=torch.bfloat16))
    one = GatedDeltaState(torch.ones(1, 2, 3, 4), torch.ones(1, 5, 3, dtype=torch.bfloat16))
    states.add_adjoint(one)
    for _ in range(512):
        states.add_adjoint(one.map(lambda t: t * 2.0**-9))
    torch.testing.assert_close(states.adjoint.conv, torch.full((1, 5, 3), 2.0))


def test_a_shared_state_expands_to_a_batch():
    state = draw()
    expanded = state.expand_batch(4)
    assert expanded.recurrent.shape[0] == expanded.conv.shape[0] == 4
    assert torch.equal(expanded.conv[3], state.conv[0])
    assert draw(batch=4).expand_batch(4).recurrent.shape[0] == 4


def test_selected_members_keep_their_states():
    states, state = open_states(), draw(batch=4)
    states.keep(2, state)
    states.select_batch(torch.tensor([3, 1]))
    assert torch.equal(states.at(2).recurrent, state.recurrent[[3, 1]])
    assert torch.equal(states.at(2).conv, state.conv[[3, 1]])
