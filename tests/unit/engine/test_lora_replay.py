"""Low-rank pairs under replay: exact gradients, nothing kept for frozen weights, starts, merging, and bad ranks."""

from dataclasses import replace

import pytest
import torch

from longstraw.patches.finalize_model_grads import wrap_for_gradients
from longstraw.patches.float64 import lift_float64
from longstraw.patches.lora import add_pairs, find_pairs, is_pair, merge_pairs
from longstraw.patches.projections import find_projections
from megatron.grpo.lora import describe_pairs, start_pairs
from megatron.grpo.presets import get_preset
from tests.support.dense import compare_gradients, dense_gradients
from tests.support.latent_models import small_preset
from tests.support.models import build_pair, draw_group, one_rank, replay_gradients
from tests.support.pairs import chain_rule, draw_pairs

RANK, ALPHA = 3, 7.0
LATENT_EXPERTS = dict(
    num_layers=3, moe_layer_freq=(0, 1, 1), num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=12,
    moe_shared_expert_intermediate_size=16,
)


def preset_of(name):
    if name == "latent-experts":
        return small_preset(**LATENT_EXPERTS)
    return replace(get_preset("tiny-qwen3.6"), num_layers=2, linear_attention_freq=2, hidden_size=64, ffn_hidden_size=96)


def adapted(name, dtype=torch.float64):
    """A pair of models, the stateful one with low-rank pairs that the other has merged in; whole A and B."""
    models = build_pair(preset_of(name), dtype, one_rank())
    add_pairs(models.model, RANK, ALPHA)
    names = [n for n, _ in models.model.named_parameters() if is_pair(n)]
    return models, draw_pairs(models, one_rank(), names)


@pytest.mark.parametrize("name", ["hybrid", "latent-experts"])
@pytest.mark.parametrize("prompt, chunk, block", [(43, 16, 5), (1, 8, 8)])
def test_gradients_equal_dense_autograd(name, prompt, chunk, block):
    models, whole = adapted(name)
    group = draw_group(prompt, (5, 17, 1), models.vocab_size)
    engine = models.engine(prompt_chunk_size=chunk, response_block_size=block)
    loss, found = replay_gradients(engine, group.tree())
    with lift_float64():
        expected_loss, dense = dense_gradients(models.plain, group.sequences(), vocab_size=models.vocab_size)
    expected = chain_rule(dense, whole, ALPHA / RANK)
    total, single = compare_gradients(found, expected)
    assert total <= 1e-12 and max(single.values()) <= 1e-11, (total, max(single, key=single.get))
    assert abs(loss - expected_loss) <= 1e-12 * max(1.0, abs(expected_loss))
    assert sum(is_pair(n) and bool(g.any()) for n, g in found.items()) >= 0.9 * len(whole)


def test_every_called_matrix_has_a_pair_and_no_other():
    """The absorbed matrix, indexer, router, embedding and norms have none."""
    model = adapted("latent-experts")[0].model
    missing = [m.name for m in find_projections(model) if not hasattr(m.module, "lora_a")]
    assert missing == [f"decoder.layers.{n}.self_attention.linear_kv_up_proj.weight" for n in range(3)]
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {n for n, _ in model.named_parameters() if is_pair(n)}
    assert len(trained) == 2 * len(find_pairs(model)) and describe_pairs(model) == {"rank": RANK, "alpha": ALPHA}


def test_frozen_weights_have_no_gradient_buffer():
    models, whole = adapted("latent-experts")
    ddp = wrap_for_gradients(models.model, one_rank())
    buffers = ddp.buffers + ddp.expert_parallel_buffers
    assert sum(b.grad_data.nbytes for b in buffers) == sum(tensor.nbytes for tensor in whole.values())
    for name, parameter in models.model.named_parameters():
        assert hasattr(parameter, "main_grad") == is_pair(name), name


def test_pairs_start_by_name_at_the_model_without_them():
    """A of variance 1 / k from the seed and the name alone, B zero: the same loss, and the caller's random state."""
    models = build_pair(preset_of("hybrid"), torch.float64, one_rank())
    group = draw_group(20, (5, 2), models.vocab_size)
    before, _ = replay_gradients(models.engine(), group.tree())
    state = torch.get_rng_state()
    start_pairs(models.model, 16, ALPHA, 5, one_rank())
    assert torch.equal(torch.get_rng_state(), state)
    after, _ = replay_gradients(models.engine(), group.tree())
    assert after == pytest.approx(before, rel=1e-14)
    drawn = {pair.matrix.name: pair.a.detach() for pair in find_pairs(models.model)}
    for name, a in drawn.items():
        assert abs(float(a.square().mean()) * a.shape[1] - 1) < 0.25, name
    same = [a for n, a in drawn.items() if n.endswith("linear_fc1.weight")]
    assert len(same) == 2 and not torch.equal(*same)
    other = build_pair(preset_of("hybrid"), torch.float64, one_rank())
    start_pairs(other.model, 16, ALPHA, 6, one_rank())
    assert not torch.equal(find_pairs(other.model)[0].a, find_pairs(models.model)[0].a)


@pytest.mark.parametrize("name", ["hybrid", "latent-experts"])
def test_merged_pairs_leave_a_plain_model(name):
    models, _ = adapted(name)
    group = draw_group(20, (5, 2), models.vocab_size)
    before, _ = replay_gradients(models.engine(), group.tree())
    count, names = len(find_pairs(models.model)), {n for n, _ in models.model.named_parameters() if not is_pair(n)}
    assert merge_pairs(models.model) == count and merge_pairs(models.model) == 0
    assert {n for n, _ in models.model.named_parameters()} == names
    plain = dict(models.plain.named_parameters())
    for parameter_name, parameter in models.model.named_parameters():
        torch.testing.assert_close(parameter, plain[parameter_name], rtol=1e-13, atol=1e-13)
    models.model.requires_grad_(True)
    after, _ = replay_gradients(models.engine(), group.tree())
    assert after == pytest.approx(before, rel=1e-12)


def test_a_rank_above_a_matrix_is_refused_and_nothing_is_changed():
    models = build_pair(preset_of("latent-experts"), torch.float64, one_rank())
    with pytest.raises(ValueError, match=r"--lora-rank 13 is above the 12 columns of .*linear_fc2.weight \[32, 12\]"):
        add_pairs(models.model, 13, ALPHA)
    assert find_pairs(models.model) == [] and any(p.requires_grad for p in models.model.parameters())
    with pytest.raises(ValueError, match="--lora-rank finds no projection matrix.*--transformer-impl local"):
        add_pairs(torch.nn.Linear(3, 3), 1, ALPHA)
