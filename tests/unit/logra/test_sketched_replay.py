"""Sketches through the replay engine: S equals the dense gradient times A^T, whatever the blocks; nothing else is kept."""

import pytest
import torch

from longstraw.optim.config import LograConfig
from longstraw.optim.projection import project_columns
from longstraw.patches.float64 import lift_float64
from longstraw.patches.projections import find_projections, replace_product
from tests.support.logra import sketched
from tests.support.models import dense_of, draw_group, get_pair, get_small_hybrid

CONFIG = LograConfig(logra_rank=5, update_step_size="update-ratio")


def worst_error(pair, group, config=CONFIG, together=1, **engine) -> float:
    """Largest relative error of a sketch, over all matrices."""
    _, gradients = dense_of(pair, group)
    with sketched(pair, config) as under, lift_float64():
        pair.engine(**engine).replay(group.tree(together=together))
        assert all(p.grad is None for p in pair.model.parameters())
        errors = []
        for weight in under.logra.weights:
            a = project_columns(weight.projection, 0, weight.placement.columns, dtype=torch.float64)
            wanted = gradients[weight.name] @ a.t()
            if wanted.norm() == 0:  # an expert that no token chose
                assert "local_experts" in weight.name and not weight.sketch.sketch.any()
                continue
            errors.append(((weight.sketch.sketch - wanted).norm() / wanted.norm()).item())
    return max(errors)


@pytest.mark.parametrize("preset", ["tiny-qwen3.6", "tiny-llama", "tiny-qwen3-moe", "tiny-glm5.2"])
def test_sketch_equals_dense_gradient_times_projection(preset):
    """Attention, gated delta nets, MLPs, experts, and the matrix that latent attention absorbs."""
    pair = get_pair(preset)
    assert worst_error(pair, draw_group(43, (5, 17, 1), pair.vocab_size)) <= 1e-12


@pytest.mark.parametrize("prompt, responses, chunk, block, together", [
    (2, (1,), 1, 1, 1), (1, (3, 1), 16, 2, 1), (37, (4, 4), 7, 3, 2), (64, (9,), 64, 9, 1),
])
def test_any_sizes(prompt, responses, chunk, block, together):
    pair = get_small_hybrid()
    group = draw_group(prompt, responses, pair.vocab_size)
    sizes = dict(prompt_chunk_size=chunk, response_block_size=block)
    for kind in ("rademacher", "gaussian"):
        config = LograConfig(logra_rank=3, logra_projection=kind, update_step_size="update-ratio")
        assert worst_error(pair, group, config, together=together, **sizes) <= 1e-12


def test_without_the_prompts_sweep_the_sketch_is_another():
    """The measure can see what is missing: the prompt's part of the gradient."""
    pair = get_small_hybrid()
    group = draw_group(37, (4, 4), pair.vocab_size)
    assert worst_error(pair, group, semantics="response_only") > 0.05


def test_projections_are_the_linears_of_layers_and_not_the_indexers():
    pair = get_pair("tiny-glm5.2")
    names = [matrix.name for matrix in find_projections(pair.model)]
    assert not any("indexer" in name or "router" in name or "output_layer" in name for name in names)
    assert any("shared_experts" in name for name in names) and any("local_experts.15" in name for name in names)
    absorbed = [matrix for matrix in find_projections(pair.model) if not matrix.called]
    assert [m.name.split(".")[-2] for m in absorbed] == ["linear_kv_up_proj"] * pair.model.config.num_layers
    with pytest.raises(ValueError, match="never calls the linear"):
        replace_product(absorbed[0], torch.nn.functional.linear)


def test_a_weight_of_two_modules_is_refused():
    pair = get_small_hybrid()
    first, second = (layer.mlp.linear_fc1 for layer in pair.model.decoder.layers[:2])
    own, second.weight = second.weight, first.weight
    try:
        with pytest.raises(ValueError, match="layers.0.mlp.linear_fc1.weight and .*layers.1.* are one weight"):
            find_projections(pair.model)
    finally:
        second.weight = own
