"""The float64 lift, and Megatron's delta rule under it against ours: split anywhere, from any state."""

import pytest
import torch
from megatron.core.ssm.gated_delta_net.common import torch_chunk_gated_delta_rule

from longstraw.attention.delta_rule import chunked_delta_rule, naive_delta_rule
from longstraw.patches.float64 import lift_float64
from tests.support.errors import relative_error


def test_casts_of_float64_to_float32_are_lifted_inside_the_block():
    x = torch.ones(2, dtype=torch.float64)
    with lift_float64():
        assert x.float() is x and x.to(torch.float32) is x and x.to(dtype=torch.float32) is x
    assert x.float().dtype is x.to(torch.float32).dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_other_dtypes_are_left_alone(dtype):
    x = torch.ones(2, dtype=dtype)
    with lift_float64():
        assert x.float().dtype is x.to(torch.float32).dtype is torch.float32
        assert x.double().dtype is torch.float64


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.int64])
def test_other_casts_of_float64_are_left_alone(target):
    x = torch.ones(2, dtype=torch.float64)
    with lift_float64():
        assert x.to(target).dtype is target and x.to(dtype=target).dtype is target
        assert x.to("cpu").dtype is torch.float64


def draw(tokens, dtype=torch.float64, seed=0):
    """q, k, v, g, beta and a state, as a layer makes them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(normal(2, tokens, 3, 8), dim=-1) for _ in range(2))
    v, g, beta = normal(2, tokens, 3, 6), -normal(2, tokens, 3).exp(), normal(2, tokens, 3).sigmoid()
    return [t.to(dtype).requires_grad_() for t in (q, k, v, g, beta, normal(2, 3, 8, 6))]


def megatron_rule(q, k, v, g, beta, state):
    """Megatron's rule with both states; it scales q by itself, as ours does."""
    return torch_chunk_gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=True)


def differentiate(rule, inputs):
    o, end = rule(*inputs)
    generator = torch.Generator().manual_seed(9)
    grads = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in (o, end)]
    return [o.detach(), end.detach(), *torch.autograd.grad((o, end), inputs, grads)]


@pytest.mark.parametrize("rule", [naive_delta_rule, chunked_delta_rule])
@pytest.mark.parametrize("tokens", [1, 5, 64, 70])
def test_ours_equals_megatrons_lifted_to_float64(rule, tokens):
    """Outputs, end state and every gradient, the initial state's included."""
    inputs = draw(tokens)
    with lift_float64():
        expected = differentiate(megatron_rule, inputs)
    assert relative_error(differentiate(rule, inputs), expected) < 1e-12


def test_without_the_lift_megatrons_rule_is_float32():
    """The control: the island is there, and the lift is what removes it."""
    inputs = draw(20)
    found = megatron_rule(*(t.detach() for t in inputs))[0]
    assert relative_error([found], [naive_delta_rule(*inputs)[0].detach()]) > 1e-9


@pytest.mark.parametrize("cut", [1, 4, 63, 64, 69])
def test_ours_in_two_pieces_equals_megatrons_in_one(cut):
    def in_pieces(q, k, v, g, beta, state):
        first, state = chunked_delta_rule(*(t[:, :cut] for t in (q, k, v, g, beta)), state)
        second, state = chunked_delta_rule(*(t[:, cut:] for t in (q, k, v, g, beta)), state)
        return torch.cat([first, second], 1), state

    inputs = draw(70)
    with lift_float64():
        expected = differentiate(megatron_rule, inputs)
    assert relative_error(differentiate(in_pieces, inputs), expected) < 1e-12


def test_the_lift_changes_nothing_in_float32():
    """The lifted form against the original: on float32 inputs, the same bits."""
    inputs = draw(70, torch.float32)
    plain = differentiate(megatron_rule, inputs)
    with lift_float64():
        lifted = differentiate(megatron_rule, inputs)
    assert all(torch.equal(a, b) for a, b in zip(plain, lifted, strict=True))


def test_in_float32_ours_is_as_precise_as_megatrons():
    found = expected = 0.0
    for seed in range(3):
        inputs = draw(100, torch.float32, seed)
        with lift_float64():
            oracle = differentiate(megatron_rule, [t.detach().double().requires_grad_() for t in inputs])
        found += relative_error(differentiate(chunked_delta_rule, inputs), oracle)
        expected += relative_error(differentiate(megatron_rule, inputs), oracle)
    assert found <= 2 * expected
