"""The decoder block of the supported models, and what it refuses."""

import argparse
import functools
from dataclasses import replace

import pytest
import torch
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttention
from megatron.core.transformer.moe.moe_layer import MoELayer

from longstraw.adapters.registry import find_adapters
from longstraw.patches.layer_specs import build_decoder_spec
from longstraw.patches.linears import Linears, ReplicatedLinear, pick_linears
from longstraw.patches.norms import RMSNorm
from megatron.grpo.model_provider import build_conventional_model, build_model
from megatron.grpo.presets import check_divisible, get_preset
from tests.support.models import get_pair, get_small_hybrid, one_rank


def spec_of(preset="tiny-qwen3.6", **changes):
    config = get_preset(preset).transformer_config()
    for name, value in changes.items():
        setattr(config, name, value)
    return build_decoder_spec(config, core_attention=DotProductAttention, gated_delta_net=GatedDeltaNet)


@functools.cache
def get_conventional(preset: str):
    preset, groups = get_preset(preset), one_rank()
    return build_conventional_model(preset, preset.transformer_config(use_cpu_initialization=True), groups, flash=False)


def test_layer_pattern_of_a_hybrid():
    spec = spec_of()
    kinds = [layer.submodules.self_attention.module for layer in spec.layer_specs]
    assert kinds == [GatedDeltaNet, GatedDeltaNet, GatedDeltaNet, SelfAttention]
    assert spec.layer_norm is RMSNorm


def test_every_layer_of_a_dense_model_is_full_attention():
    spec = spec_of("tiny-llama")
    assert [layer.submodules.self_attention.module for layer in spec.layer_specs] == [SelfAttention] * 4


def test_layers_of_latent_attention_and_experts():
    """Every layer attends to latents; the first one's MLP is dense; those that share a selection have no indexer."""
    model, preset = get_conventional("tiny-glm5.2"), get_preset("tiny-glm5.2")
    layers = model.decoder.layers
    assert {type(layer.self_attention) for layer in layers} == {AbsorbedMLASelfAttention}
    assert [isinstance(layer.mlp, MoELayer) for layer in layers] == [bool(n) for n in preset.moe_layer_freq]
    selecting = [layer.layer_number for layer in layers if layer.self_attention.core_attention.indexer is not None]
    assert selecting == [1, 2, 3, 7]
    assert all(isinstance(layer.mlp.shared_experts, torch.nn.Module) for layer in layers[1:])


def test_norms_of_latents_have_their_own_epsilon():
    for layer in get_conventional("tiny-glm5.2").decoder.layers:
        attention = layer.self_attention
        assert attention.q_layernorm.eps == attention.kv_layernorm.eps == 1e-6 and layer.input_layernorm.eps == 1e-5


def test_a_replicated_linear_is_a_product_and_no_bias():
    config = get_preset("tiny-glm5.2").transformer_config(use_cpu_initialization=True)
    linear = ReplicatedLinear(3, 5, config=config, init_method=torch.nn.init.normal_, parallel_mode="duplicated")
    x = torch.randn(2, 3)
    product, bias = linear(x)
    assert bias is None and torch.equal(product, x @ linear.weight.t())


@pytest.mark.parametrize("wish", [
    dict(bias=True), dict(parallel_mode="column"), dict(skip_weight_param_allocation=True), dict(is_expert=True)
])
def test_a_replicated_linear_refuses_what_it_is_not(wish):
    config = get_preset("tiny-glm5.2").transformer_config(use_cpu_initialization=True)
    with pytest.raises(ValueError, match="one whole weight and no bias"):
        ReplicatedLinear(3, 5, config=config, init_method=torch.nn.init.normal_, **wish)


@pytest.mark.parametrize("changes, flag", [
    (dict(num_moe_experts=4, moe_grouped_gemm=True), "--moe-grouped-gemm needs --transformer-impl transformer_engine"),
    (dict(multi_latent_attention=True), "--multi-latent-attention needs --experimental-attention-variant dsa"),
    (dict(normalization="LayerNorm"), "--normalization LayerNorm is not supported: use --normalization RMSNorm"),
])
def test_unsupported_blocks_are_refused(changes, flag):
    with pytest.raises(ValueError, match=flag):
        spec_of(**changes)


def test_linears_are_megatrons_own_unless_transformer_engine_is_asked_for():
    config = get_preset("tiny-llama").transformer_config()
    assert pick_linears(config) == Linears(ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)


def test_transformer_engine_without_transformer_engine_is_refused():
    from megatron.core.extensions import transformer_engine as te

    if te.HAVE_TE:
        pytest.skip("Transformer Engine is installed")
    config = get_preset("tiny-llama").transformer_config()
    config.transformer_impl = "transformer_engine"
    with pytest.raises(ImportError, match="--transformer-impl transformer_engine needs Transformer Engine"):
        pick_linears(config)


def test_both_models_have_the_same_parameters():
    """Weights move between the stateful and the conventional model by name."""
    pair = get_small_hybrid()
    shapes = [{name: p.shape for name, p in m.named_parameters()} for m in (pair.plain, pair.model)]
    assert shapes[0] == shapes[1]


def test_every_layer_has_one_adapter_in_order():
    pair = get_pair("tiny-qwen3.6")
    adapters = find_adapters(pair.model, 4)
    assert [adapter.layer_number for adapter in adapters] == [1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"has 5 layers, but stateful modules stand in layers \[1, 2, 3, 4\]"):
        find_adapters(pair.model, 5)


def test_a_conventional_model_is_refused_by_the_engine():
    pair = get_pair("tiny-qwen3.6")
    with pytest.raises(ValueError, match=r"stateful modules stand in layers \[\].*--pipeline-model-parallel-size 1"):
        find_adapters(pair.plain, 4)


@pytest.mark.parametrize("sizes, sentence", [
    (dict(tensor_model_parallel_size=4), "--tensor-model-parallel-size 4 does not divide the 4 query heads and 2 key/value"),
    (dict(context_parallel_size=8), "x --context-parallel-size 8 does not divide the 4 gated delta net key heads"),
    (dict(tensor_model_parallel_size=2, context_parallel_size=4), "--tensor-model-parallel-size 2 x --context-parallel-size 4"),
])
def test_parallel_sizes_that_do_not_divide_the_heads_are_refused(sizes, sentence):
    preset = get_preset("tiny-qwen3.6")
    config = preset.transformer_config()
    for name, value in sizes.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=sentence):
        build_model(preset, config, one_rank())


@pytest.mark.parametrize("preset, changes, sizes, sentence", [
    ("tiny-glm5.2", {}, dict(expert_model_parallel_size=3), "--expert-model-parallel-size 3 does not divide --num-experts 16"),
    ("tiny-llama", {}, dict(expert_model_parallel_size=2), "--expert-model-parallel-size 2: --model-preset tiny-llama has no"),
    ("tiny-glm5.2", {}, dict(tensor_model_parallel_size=2), "--tensor-model-parallel-size 2 is not supported with the latent"),
    ("tiny-qwen3-moe", {}, dict(tensor_model_parallel_size=2), "--tensor-model-parallel-size 2 is not supported with the exp"),
    ("tiny-glm5.2", dict(moe_router_topk=17), {}, "--moe-router-topk 17 does not lie between 1 and --num-experts 16"),
    ("tiny-glm5.2", dict(num_layers=6), {}, "--moe-layer-freq names 8 layers, but --num-layers is 6"),
    ("tiny-glm5.2", dict(dsa_indexer_head_dim=4), {}, "--dsa-indexer-head-dim 4 is below --qk-pos-emb-head-dim 8"),
    ("tiny-glm5.2", dict(dsa_indexer_topk=0), {}, "--dsa-indexer-topk must be at least 1, not 0"),
    ("tiny-deepseek-v3.2", dict(moe_router_num_groups=3), {}, "--moe-router-num-groups 3 does not divide --num-experts 16"),
    ("tiny-deepseek-v3.2", dict(moe_router_topk=9), {}, "--moe-router-group-topk 2 of --moe-router-num-groups 4 leaves fewer"),
])
def test_sizes_that_experts_and_selection_cannot_have_are_refused(preset, changes, sizes, sentence):
    whole = dict(tensor_model_parallel_size=1, context_parallel_size=1, expert_model_parallel_size=1)
    with pytest.raises(ValueError, match=sentence):
        check_divisible(replace(get_preset(preset), **changes), argparse.Namespace(**whole | sizes))


def test_flash_and_written_out_core_attention_agree():
    """The conventional model of the benchmark (fused kernel) and of the audit (Megatron's own): the same outputs."""
    preset, groups = get_preset("tiny-llama"), one_rank()
    models = [
        build_conventional_model(preset, preset.transformer_config(use_cpu_initialization=True), groups, flash=flash).double()
        for flash in (False, True)
    ]
    models[1].load_state_dict(models[0].state_dict())
    ids = torch.randint(128, (2, 13))
    mask = torch.ones(13, 13, dtype=torch.bool).triu(1)[None, None]
    torch.testing.assert_close(models[0](ids, None, mask), models[1](ids, None, mask), rtol=1e-6, atol=1e-6)
