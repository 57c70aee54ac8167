"""RMSNorm of the layer specs: the formula, zero-centred weights, the sequence-parallel mark."""

import pytest
import torch

from longstraw.patches.float64 import lift_float64
from longstraw.patches.norms import GatedOutputNorm, RMSNorm
from megatron.grpo.presets import get_preset
from tests.support.errors import relative_error


def build(kind=RMSNorm, *, zero_centered=False, sequence_parallel=False, eps=1e-5):
    config = get_preset("tiny-llama").transformer_config(
        layernorm_zero_centered_gamma=zero_centered, sequence_parallel=sequence_parallel,
        tensor_model_parallel_size=2 if sequence_parallel else 1,
    )
    return kind(config, 24, eps=eps)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype, bar", [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2**-7)], ids=str)
def test_formula(zero_centered, dtype, bar):
    norm = build(zero_centered=zero_centered, eps=1e-3).to(dtype)
    with torch.no_grad():
        norm.weight += torch.randn(24)
    x = torch.randn(3, 5, 24, dtype=torch.float64).to(dtype)
    with lift_float64():
        found = norm(x)
    scale = norm.weight.double() + (1 if zero_centered else 0)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-3).sqrt() * scale
    assert found.dtype is dtype and relative_error([found.detach()], [expected.detach()]) < bar


@pytest.mark.parametrize("zero_centered, initial", [(False, 1.0), (True, 0.0)])
def test_starts_as_the_plain_normalisation(zero_centered, initial):
    norm = build(zero_centered=zero_centered)
    assert (norm.weight == initial).all()
    x = torch.randn(2, 24)
    torch.testing.assert_close(norm(x).square().mean(-1), torch.ones(2), rtol=1e-3, atol=0)


def test_the_output_norm_of_a_gated_delta_net_is_never_zero_centred():
    assert (build(GatedOutputNorm, zero_centered=True).weight == 1).all()


@pytest.mark.parametrize("on", [False, True])
def test_sequence_parallel_weights_are_marked(on):
    """finalize_model_grads adds the gradients of marked parameters over TP: without the mark they would be partial."""
    assert build(sequence_parallel=on).weight.sequence_parallel is on


def test_statistics_of_narrow_inputs_are_wide():
    """Values whose squares overflow in float16 are normalised all the same."""
    norm = build().half()
    assert norm(torch.full((1, 24), 1000.0, dtype=torch.float16)).isfinite().all()
