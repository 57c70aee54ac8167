"""config.json -> ModelPreset -> config.json, and every value that is refused."""

import dataclasses

import pytest
from conversion_models import CONFIGS

from megatron.grpo.conversion.architecture import (
    FAMILIES,
    hf_config_from_preset,
    left_out_of_config,
    pick_family,
    preset_from_hf_config,
)
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

    config_class, fields = CONFIGS[family]
    return getattr(transformers, config_class)(**fields).to_dict() | changes


@pytest.mark.parametrize("family", CONFIGS)
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


@pytest.mark.parametrize("name", PRESETS)
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


LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}  # fmt: skip
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
