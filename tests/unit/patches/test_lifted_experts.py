"""The float64 lift over Megatron's latent attention, indexer, router and experts: the same model, and no float32 left."""

import functools

import pytest
import torch
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from longstraw.patches.float64 import lift_float64
from megatron.grpo.model_provider import build_conventional_model
from megatron.grpo.presets import get_preset
from tests.support.errors import relative_error
from tests.support.models import draw_weights, one_rank

PRESETS = ["tiny-glm5.2", "tiny-deepseek-v3.2", "tiny-qwen3-moe"]


@functools.cache
def get_model(name: str, dtype: torch.dtype) -> torch.nn.Module:
    preset, groups = get_preset(name), one_rank()
    model_parallel_cuda_manual_seed(1)
    router = "fp64" if dtype is torch.float64 else "fp32"
    config = preset.transformer_config(use_cpu_initialization=True, moe_router_dtype=router)
    model = build_conventional_model(preset, config, groups, flash=False).to(dtype)
    draw_weights(model, 1)
    return model


def differentiate(model) -> list[torch.Tensor]:
    """Logits of 24 tokens and the gradients of a weighted sum of them."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(128, (1, 24), generator=generator)
    mask = torch.ones(24, 24, dtype=torch.bool).triu(1)[None, None]
    model.zero_grad()
    logits = model(ids, None, mask)
    logits.backward(torch.randn(logits.shape, generator=generator, dtype=torch.float64).to(logits.dtype))
    return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", PRESETS)
def test_the_lift_changes_nothing_in_float32(name):
    model = get_model(name, torch.float32)
    plain = differentiate(model)
    with lift_float64():
        lifted = differentiate(model)
    assert all(torch.equal(a, b) for a, b in zip(plain, lifted, strict=True))


@pytest.mark.parametrize("name", PRESETS)
def test_the_lifted_model_is_the_original_to_float32s_precision(name):
    """And not closer without the lift: the islands are there, and the lift is what removes them."""
    model = get_model(name, torch.float64)
    with lift_float64():
        lifted = differentiate(model)
    islands = differentiate(model)
    error = relative_error(islands, lifted)
    assert 1e-9 < error < 1e-5, error


@pytest.mark.parametrize("name", PRESETS)
def test_nothing_in_a_lifted_pass_is_float32(name):
    """Every floating tensor that autograd saves is float64; the biases of experts alone stay as Megatron keeps them."""
    model, narrow = get_model(name, torch.float64), []

    def look(tensor):
        if tensor.dtype is torch.float32:
            narrow.append(tuple(tensor.shape))
        return tensor

    with lift_float64(), torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
        differentiate(model)
    assert not narrow


def test_a_function_asked_for_float32_of_a_float64_tensor_gives_float64():
    x = torch.randn(3, 4, dtype=torch.float64)
    with lift_float64():
        assert torch.equal(torch.softmax(x, dim=-1, dtype=torch.float32), x.softmax(-1))
        assert x.sum(dtype=torch.float32).dtype is torch.float64
        assert torch.softmax(x.float().to(torch.bfloat16), dim=-1, dtype=torch.float32).dtype is torch.float32
    assert torch.softmax(x, dim=-1, dtype=torch.float32).dtype is torch.float32
