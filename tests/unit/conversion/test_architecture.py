"""config.json -> ModelPreset -> config.json, and every value that is refused."""

import dataclasses

import pytest
from conversion_models import ALL_CONFIGS

from megatron.grpo.conversion.architecture import (
    FAMILIES,
    hf_config_from_preset,
    left_out_of_config,
    pick_family,
    preset_from_hf_config,
)
from megatron.grpo.conversion.latent_architecture import selects
from megatron.grpo.presets import PRESETS

# The text part of Qwen3.6-27B's published config.json.
QWEN36_27B = {
    "model_type": "qwen3_5_text", "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True,
    "dtype": "bfloat16", "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
    "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 17408, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_value_head_dim": 128,
    "max_position_embeddings": 262144, "mlp_only_layers": [], "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False, "num_attention_heads": 24, "num_hidden_layers": 64, "num_key_value_heads": 4,
    "output_gate_type": "swish", "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "tie_word_embeddings": False,
    "use_cache": True, "vocab_size": 248320, "mamba_ssm_dtype": "float32",
    "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
                        "rope_theta": 10000000, "partial_rotary_factor": 0.25},
}  # fmt: skip


def config_of(family: str, **changes) -> dict:
    import transformers

    config_class, fields = ALL_CONFIGS[family]
    return getattr(transformers, config_class)(**fields).to_dict() | changes


@pytest.mark.parametrize("family", ALL_CONFIGS)
def test_a_config_survives_the_preset(family):
    from transformers import CONFIG_MAPPING

    config = config_of(family)
    preset = preset_from_hf_config(config, name="x")
    written = hf_config_from_preset(preset, dtype="bfloat16", source=config)
    assert written["architectures"] == [FAMILIES[family]]
    again = CONFIG_MAPPING[family](**written).to_dict()
    ignored = {"architectures", "dtype", "transformers_version", "rope_parameters", "_name_or_path"}
    assert {k: v for k, v in again.items() if k not in ignored} == {k: v for k, v in config.items() if k not in ignored}
    assert again["rope_parameters"].items() >= {k: v for k, v in config["rope_parameters"].items()}.items()
    assert preset_from_hf_config(written, name="x") == preset


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "tiny-qwen3-moe"])
def test_every_preset_has_a_config_that_means_the_same(name):
    preset = PRESETS[name]
    assert preset_from_hf_config(hf_config_from_preset(preset, dtype="float32"), name=name) == preset


def test_the_published_qwen36_config_is_the_preset():
    published = preset_from_hf_config(
        {"model_type": "qwen3_5", "text_config": QWEN36_27B, "vision_config": {"depth": 27}, "tie_word_embeddings": False},
        name="qwen3.6-27b",
        ignore=("mlp_only_layers",),
    )
    # The preset's positions go beyond those that the model was published with.
    assert dataclasses.replace(published, max_position_embeddings=4_456_448) == PRESETS["qwen3.6-27b"]


def test_what_a_multimodal_config_loses_is_named():
    config = {"model_type": "qwen3_5", "text_config": QWEN36_27B, "vision_config": {"depth": 27}}
    assert set(left_out_of_config(config)) == {"vision_config", "mtp_num_hidden_layers"}


def test_defaults_are_those_of_transformers():
    preset = preset_from_hf_config({"model_type": "llama", "hidden_size": 96, "num_attention_heads": 4})
    assert (preset.kv_channels, preset.num_query_groups, preset.rotary_base, preset.tied_embeddings) == (24, 4, 10_000, False)


# GLM-5.2's published config.json.
GLM52 = {
    "model_type": "glm_moe_dsa", "architectures": ["GlmMoeDsaForCausalLM"], "attention_bias": False,
    "attention_dropout": 0.0, "dtype": "bfloat16", "eos_token_id": [154820, 154827, 154829], "ep_size": 1,
    "first_k_dense_replace": 3, "head_dim": 192, "hidden_act": "silu", "hidden_size": 6144, "index_head_dim": 128,
    "index_n_heads": 32, "index_share_for_mtp_iteration": True, "index_skip_topk_offset": 3, "index_topk": 2048,
    "index_topk_freq": 4, "index_topk_pattern": None, "indexer_rope_interleave": True,
    "indexer_types": ["full"] * 3 + (["shared"] * 3 + ["full"]) * 18 + ["shared"] * 3, "initializer_range": 0.02,
    "intermediate_size": 12288, "kv_lora_rank": 512, "max_position_embeddings": 1048576,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "n_group": 1, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 78, "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1, "pad_token_id": 154820, "pretraining_tp": 1, "q_lora_rank": 2048, "qk_head_dim": 256,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_interleave": True,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"}, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc",
    "transformers_version": "5.12.0", "use_cache": True, "v_head_dim": 256, "vocab_size": 154880,
}  # fmt: skip


def test_the_published_glm52_config_is_the_preset():
    published = preset_from_hf_config(GLM52, name="glm-5.2")
    assert dataclasses.replace(published, max_position_embeddings=2_113_536) == PRESETS["glm-5.2"]
    assert set(left_out_of_config(GLM52)) == {"num_nextn_predict_layers"}
    written = hf_config_from_preset(published, dtype="bfloat16", source=GLM52)
    assert {key for key in GLM52 if written.get(key) != GLM52[key]} == {
        "head_dim",  # of the rotary part, as transformers means it
        "num_nextn_predict_layers", "index_share_for_mtp_iteration", "ep_size", "transformers_version",
    }  # fmt: skip


def test_transformers_defaults_are_the_glm52_preset_but_for_its_schedule_and_rotary_base():
    from transformers import GlmMoeDsaConfig

    said = dict(index_topk_freq=4, index_skip_topk_offset=3, rope_parameters={"rope_type": "default", "rope_theta": 8e6})
    preset = preset_from_hf_config(GlmMoeDsaConfig(**said).to_dict(), name="glm-5.2")
    assert dataclasses.replace(preset, max_position_embeddings=2_113_536) == PRESETS["glm-5.2"]
    every = preset_from_hf_config({"model_type": "glm_moe_dsa"}, name="glm-5.2")
    assert (every.dsa_indexer_topk_freq, every.dsa_indexer_skip_topk_offset, every.rotary_base) == (1, 0, 10_000)


def test_transformers_defaults_of_deepseek_v32():
    preset = preset_from_hf_config({"model_type": "deepseek_v32"})
    assert (preset.moe_router_num_groups, preset.moe_router_group_topk, preset.moe_router_topk) == (8, 4, 8)
    assert (preset.num_layers, sum(preset.moe_layer_freq), preset.dsa_indexer_n_heads) == (61, 58, 64)
    assert not preset.dsa_indexer_rope_interleaved and preset.dsa_indexer_topk_freq == 1


SCHEDULES = {"FFFSSSFS": (4, 3), "FSSSFSSS": (4, 1), "FFFFFFFF": (1, 0), "FFFFFSSS": (8, 5), "FSSSSSSS": (8, 1)}


@pytest.mark.parametrize("pattern", SCHEDULES)
def test_the_schedule_of_the_selection_is_read_from_any_of_its_forms(pattern):
    from megatron.core.transformer.experimental_attention_variant.dsa import is_dsa_skip_topk_layer

    kinds = [{"F": "full", "S": "shared"}[letter] for letter in pattern]
    shared = [kind == "shared" for kind in kinds]
    for form in ({"indexer_types": kinds}, {"index_topk_pattern": pattern}):
        config = {"model_type": "glm_moe_dsa", "num_hidden_layers": 8, **form}
        preset = preset_from_hf_config(config)
        frequency, offset = preset.dsa_indexer_topk_freq, preset.dsa_indexer_skip_topk_offset
        assert (frequency, offset) == SCHEDULES[pattern]
        assert [is_dsa_skip_topk_layer(layer + 1, offset, frequency) for layer in range(8)] == shared
        assert [not selects(preset, layer) for layer in range(8)] == shared
        assert preset_from_hf_config(hf_config_from_preset(preset, dtype="float32"), name="hf-model") == preset


LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 64}
SLIDING = ["full_attention", "sliding_attention"] * 2
THREE_TO_ONE_SHIFTED = ["full_attention", "linear_attention", "linear_attention", "linear_attention"]


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"model_type": "mixtral"}, "model_type 'mixtral' is not supported"),
        ("llama", {"rope_parameters": LLAMA3_ROPE}, "rope_type 'llama3'"),
        ("llama", {"attention_bias": True}, "attention_bias True"),
        ("llama", {"mlp_bias": True}, "mlp_bias True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ("llama", {"num_local_experts": 8}, "num_local_experts"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved True"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("qwen3", {"sliding_window": 64, "use_sliding_window": True, "layer_types": None}, "sliding_window 64"),
        ("qwen3", {"layer_types": SLIDING}, "layer_types"),
        ("qwen3", {"attention_sinks": True}, "attention_sinks"),
        ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}},
         "partial_rotary_factor 0.5"),
        ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.5}}, "rope_theta 10000.5"),
        ("qwen3_5_text", {"layer_types": THREE_TO_ONE_SHIFTED}, "every N-th layer"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate False"),
        ("qwen3_5_text", {"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid'"),
        ("glm_moe_dsa", {"norm_topk_prob": False}, "norm_topk_prob False"),
        ("glm_moe_dsa", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ("glm_moe_dsa", {"topk_method": "greedy"}, "topk_method 'greedy'"),
        ("glm_moe_dsa", {"moe_router_dtype": "bfloat16"}, "moe_router_dtype 'bfloat16'"),
        ("glm_moe_dsa", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ("glm_moe_dsa", {"rope_interleave": False}, "rope_interleave False"),
        ("glm_moe_dsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave False"),
        ("deepseek_v32", {"indexer_rope_interleave": True}, "indexer_rope_interleave True"),
        ("deepseek_v32", {"rope_parameters": YARN}, "rope_type 'yarn'"),
        ("deepseek_v32", {"index_topk_freq": 4}, "index_topk_freq 4 with index_skip_topk_offset 2"),
        ("deepseek_v32", {"indexer_types": ["full"] * 3}, "indexer_types of this DeepseekV32ForCausalLM is not"),
        ("deepseek_v32", {"topk_group": 4}, "topk_group 4 of n_group 4 is not supported with num_experts_per_tok 4"),
        ("glm_moe_dsa", {"index_topk_freq": 2}, "index_topk_freq 2 with index_skip_topk_offset 2"),
        ("glm_moe_dsa", {"index_topk_pattern": "FSSSSS"}, "index_topk_pattern 'FSSSSS'"),
        ("glm_moe_dsa", {"index_topk_freq": None, "indexer_types": ["full", "shared", "full"] * 2}, "every N-th layer"),
        ("glm_moe_dsa", {"index_topk_freq": None, "indexer_types": ["shared"] * 6}, "full in the first layers"),
        ("glm_moe_dsa", {"attention_bias": True}, "attention_bias True"),
        ("glm_moe_dsa", {"num_key_value_heads": 2}, "num_key_value_heads 2"),
        ("glm_moe_dsa", {"qk_head_dim": 24}, "qk_head_dim 24"),
        ("glm_moe_dsa", {"layer_types": ["full_attention"] * 6}, "layer_types full_attention"),
        ("glm_moe_dsa", {"mlp_layer_types": ["dense"] * 6}, "mlp_layer_types"),
        ("glm_moe_dsa", {"num_experts_per_tok": 1}, "num_experts_per_tok 1"),
        ("glm_moe_dsa", {"n_shared_experts": 0}, "n_shared_experts 0"),
        ("glm_moe_dsa", {"routed_scaling_factor": 0.0}, "routed_scaling_factor 0.0"),
        ("glm_moe_dsa", {"q_lora_rank": None}, "q_lora_rank"),
        ("glm_moe_dsa", {"swiglu_limit": 7.0}, "swiglu_limit"),
        ("glm_moe_dsa", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)  # fmt: skip
def test_what_the_modules_cannot_express_is_refused(family, changes, words):
    with pytest.raises(ValueError, match="config.json") as refusal:
        preset_from_hf_config(config_of(family, **changes))
    assert words in str(refusal.value)


def test_a_preset_without_family_is_refused():
    with pytest.raises(ValueError, match="none combines qk_layernorm, qkv_bias"):
        pick_family(dataclasses.replace(PRESETS["tiny-qwen3"], qkv_bias=True))
    with pytest.raises(ValueError, match="zero_centered_norm"):
        pick_family(dataclasses.replace(PRESETS["tiny-llama"], zero_centered_norm=True))
    with pytest.raises(ValueError, match="none combines experts, qk_layernorm"):
        pick_family(PRESETS["tiny-qwen3-moe"])


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("tiny-glm5.2", {"latent_norm_epsilon": 1e-5}, "latent_norm_epsilon 1e-05 instead of 1e-06"),
        ("tiny-glm5.2", {"dsa_indexer_k_norm_epsilon": None}, "dsa_indexer_k_norm_epsilon None instead of 1e-06"),
        ("tiny-glm5.2", {"dsa_indexer_rope_interleaved": False}, "dsa_indexer_topk_freq 4 instead of 1"),
        ("tiny-glm5.2", {"moe_shared_expert_intermediate_size": 40}, "no multiple of moe_ffn_hidden_size"),
        ("tiny-glm5.2", {"moe_router_topk": 1}, "moe_router_topk 1"),
        ("tiny-glm5.2", {"moe_router_score_function": "softmax"}, "none combines"),
        ("tiny-glm5.2", {"moe_shared_expert_intermediate_size": None}, "none combines"),
        ("tiny-deepseek-v3.2", {"moe_router_topk": 6}, "moe_router_topk 6 / moe_router_group_topk 2 other than 2"),
    ],
)
def test_a_preset_that_transformers_fixes_otherwise_is_refused(name, changes, words):
    with pytest.raises(ValueError, match=words):
        pick_family(dataclasses.replace(PRESETS[name], **changes))
