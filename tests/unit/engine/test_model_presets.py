"""Presets speak two languages that agree, weights are cut and joined by name, and padding has no probability."""

import argparse
import dataclasses
from dataclasses import replace

import pytest
import torch
from megatron.training.argument_utils import core_transformer_config_from_args
from megatron.training.arguments import add_megatron_arguments

from longstraw.adapters.decoder import rotary_rows
from longstraw.attention.layout import BlockLayout
from megatron.grpo.model_provider import pad_vocab_size
from megatron.grpo.presets import PRESETS, get_preset
from megatron.grpo.sharding import is_expert, section_sizes, shard_parameter, unshard_parameter, whole_name
from tests.support.dense import compare_gradients
from tests.support.models import (
    build_pair, dense_of, draw_group, get_pair, get_small_hybrid, one_rank, replay_gradients,
)

# The launch's, not the model's: fused kernels that a CPU has not, and settings of parallelism and numerics.
LAUNCH_FLAGS = """--no-rope-fusion --no-persist-layer-norm --no-bias-swiglu-fusion --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-dropout-fusion""".split()
LAUNCH_FIELDS = {
    "use_cpu_initialization", "deterministic_mode", "pipeline_dtype", "overlap_p2p_comm", "batch_p2p_comm",
    "deallocate_pipeline_outputs", "calculate_per_token_loss", "attention_softmax_in_fp32", "cp_comm_type",
    "inference_sampling_seed",
}


def comparable(value):
    """Initialisers are partials of one function: equal where function and arguments are."""
    return (value.func, value.args, value.keywords) if hasattr(value, "func") else value


EVERY_FIELD = replace(  # what no preset sets yet
    get_preset("tiny-qwen3"), name="every-field", qkv_bias=True, zero_centered_norm=True, attention_output_gate=True
)


@pytest.mark.parametrize("preset", [*PRESETS.values(), EVERY_FIELD], ids=lambda preset: preset.name)
def test_flags_and_config_describe_the_same_model(preset):
    """Megatron's parser over the preset's defaults gives the same TransformerConfig as the preset itself."""
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)) or argparse.ArgumentParser()
    unknown = preset.megatron_arguments().keys() - {action.dest for action in parser._actions}
    assert not unknown
    parser.set_defaults(**preset.megatron_arguments())
    args = parser.parse_args(LAUNCH_FLAGS)
    args.params_dtype = torch.float32
    from_flags, config = core_transformer_config_from_args(args), preset.transformer_config()
    different = {
        field.name: (getattr(from_flags, field.name), getattr(config, field.name))
        for field in dataclasses.fields(config)
        if comparable(getattr(from_flags, field.name)) != comparable(getattr(config, field.name))
    }
    assert different.keys() <= LAUNCH_FIELDS, different
    assert args.vocab_size == preset.vocab_size and args.rotary_base == preset.rotary_base
    assert args.rotary_percent == preset.rotary_percent
    assert args.untie_embeddings_and_output_weights is not preset.tied_embeddings


def test_an_explicit_flag_wins_over_the_preset():
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    parser.set_defaults(**get_preset("tiny-llama").megatron_arguments())
    assert parser.parse_args(["--num-layers", "6"]).num_layers == 6


def test_an_unknown_preset_is_refused():
    with pytest.raises(ValueError, match="--model-preset gpt-5 is not known; known are tiny-qwen3.6, .*smollm2-135m"):
        get_preset("gpt-5")


def test_dimensions_of_the_real_model():
    preset = get_preset("qwen3.6-27b")
    assert (preset.hidden_size, preset.num_layers, preset.ffn_hidden_size) == (5120, 64, 17_408)
    assert (preset.num_attention_heads, preset.num_query_groups, preset.kv_channels) == (24, 4, 256)
    assert (preset.linear_num_key_heads, preset.linear_num_value_heads, preset.linear_key_head_dim) == (16, 48, 128)
    assert (preset.vocab_size, preset.rotary_base, preset.rotary_percent) == (248_320, 10_000_000, 0.25)


def test_dimensions_of_the_real_sparse_model():
    preset = get_preset("glm-5.2")
    assert (preset.hidden_size, preset.num_layers, preset.ffn_hidden_size, preset.num_attention_heads) == (6144, 78, 12_288, 64)
    assert (preset.q_lora_rank, preset.kv_lora_rank) == (2048, 512)
    assert (preset.qk_head_dim, preset.qk_pos_emb_head_dim, preset.v_head_dim) == (192, 64, 256)
    assert (preset.num_experts, preset.moe_router_topk, preset.moe_ffn_hidden_size) == (256, 8, 2048)
    assert preset.moe_layer_freq == (0,) * 3 + (1,) * 75 and preset.moe_router_topk_scaling_factor == 2.5
    assert (preset.dsa_indexer_n_heads, preset.dsa_indexer_head_dim, preset.dsa_indexer_topk) == (32, 128, 2048)
    assert (preset.vocab_size, preset.rotary_base) == (154_880, 8_000_000)
    assert preset.max_position_embeddings >= 2_097_152 + 8_192


@pytest.mark.parametrize("vocab, divisible_by, tp, padded", [(101, 128, 1, 128), (128, 128, 1, 128), (129, 64, 2, 256), (5, 1, 2, 6)])
def test_padded_vocabulary(vocab, divisible_by, tp, padded):
    assert pad_vocab_size(vocab, divisible_by, tp) == padded


@pytest.mark.parametrize("preset", ["tiny-qwen3.6", "tiny-llama"])
def test_cut_and_joined_weights_are_the_same_bits(preset):
    pair = get_pair(preset)
    for name, parameter in pair.plain.named_parameters():
        shards = [shard_parameter(name, parameter, pair.preset, rank, 2) for rank in range(2)]
        assert torch.equal(unshard_parameter(name, shards, pair.preset), parameter), name
        if "norm" not in name:
            assert shards[0].numel() * 2 == parameter.numel(), name


@pytest.mark.parametrize("name, of_all", [
    ("decoder.layers.3.mlp.experts.local_experts.1.linear_fc1.weight",
     "decoder.layers.3.mlp.experts.local_experts.13.linear_fc1.weight"),
    ("decoder.layers.3.mlp.experts.linear_fc2.weight0", "decoder.layers.3.mlp.experts.linear_fc2.weight12"),
    ("decoder.layers.3.mlp.shared_experts.linear_fc1.weight", "decoder.layers.3.mlp.shared_experts.linear_fc1.weight"),
    ("decoder.layers.3.mlp.router.weight", "decoder.layers.3.mlp.router.weight"),
])
def test_an_expert_is_named_by_its_number_of_all(name, of_all):
    """Rank 3 of 4 has the experts 12 to 15 of 16."""
    assert whole_name(name, 16, 3, 4) == of_all and whole_name(name, 16, 0, 1) == name
    assert is_expert(name) == (name != of_all)


def test_every_section_of_a_fused_weight_is_cut():
    """Rank 1 of 2 gets the second half of gate and of up, of q, of k, of v: not the second half of the rows."""
    preset = get_preset("tiny-qwen3.6")
    assert section_sizes("mlp.linear_fc1.weight", torch.Size([8, 3]), preset) == [4, 4]
    rows = torch.arange(8)[:, None].float()
    assert shard_parameter("mlp.linear_fc1.weight", rows, preset, 1, 2)[:, 0].tolist() == [2, 3, 6, 7]
    assert shard_parameter("mlp.linear_fc1.lora_b", rows, preset, 1, 2)[:, 0].tolist() == [2, 3, 6, 7]
    assert shard_parameter("mlp.linear_fc2.lora_a", rows.T, preset, 1, 2)[0].tolist() == [4, 5, 6, 7]
    for whole in ("mlp.linear_fc1.lora_a", "mlp.linear_fc2.lora_b"):
        assert shard_parameter(whole, rows, preset, 1, 2) is rows
    for name, parameter in get_pair("tiny-qwen3.6").plain.named_parameters():
        sections = section_sizes(name, parameter.shape, preset)
        assert sections is None or sum(sections) == parameter.shape[0], name


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("start, length", [(0, 16), (12, 4), (5, 9)])
def test_rotary_rows_are_the_whole_sequences(ranks, start, length):
    """Every rank's rows of a chunk at any offset are those rows of the table of the whole sequence, to the bit."""
    model = get_small_hybrid().model
    whole = model.rotary_pos_emb.get_emb(64)
    for rank in range(ranks):
        layout = BlockLayout(start, length, ranks, rank, rotation=1 % ranks)
        found = rotary_rows(model, layout)
        assert torch.equal(found, whole[layout.row_position : layout.row_position + layout.rows])


def test_rotary_rows_of_a_later_chunk_on_rank_1():
    """A chunk at offset 12 of 16 over 2 ranks: rank 1's rows are 14 and 15."""
    model = get_small_hybrid().model
    found = rotary_rows(model, BlockLayout(start=12, length=4, ranks=2, rank=1))
    assert torch.equal(found, model.rotary_pos_emb.get_emb(16)[14:16])


@pytest.mark.parametrize("tied", [True, False])
def test_padding_of_the_vocabulary_has_no_probability(tied):
    """Vocabulary 101 padded to 128: losses and gradients of the 101 real rows, and none in the padding."""
    preset = replace(get_preset("tiny-llama"), num_layers=1, vocab_size=101, tied_embeddings=tied)
    pair = build_pair(preset, torch.float64, one_rank(), padded_vocab_size=128)
    group = draw_group(13, (5, 2), 101)
    loss, found = replay_gradients(pair.engine(), group.tree())
    expected_loss, expected = dense_of(pair, group)
    assert compare_gradients(found, expected)[0] <= 1e-12 and loss == pytest.approx(expected_loss, rel=1e-12)
    name = "embedding.word_embeddings.weight" if tied else "output_layer.weight"
    assert found[name].shape[0] == 128 and not found[name][101:].any() and found[name][:101].any()
