"""An HF config.json as a ModelPreset, and a ModelPreset as an HF config.json.

transformers' own config classes fill in the defaults that a config.json leaves out, so that a preset is what
transformers itself would build. Every key is accounted for: one that neither transformers nor this module knows is
refused, since it may change the model; a known one with a value that the Megatron modules cannot express is refused too.

Left out: rotary scaling (Llama 3.1's included), sliding windows, biases, and the vision half of Qwen3.5. What latent
attention and experts add is in `latent_architecture`.
"""

from typing import Any

from megatron.grpo.conversion.latent_architecture import (
    KNOWN_KEYS,
    LATENT_FAMILIES,
    NEXT_TOKEN_LAYERS,
    latent_fields,
    latent_hf_fields,
    only_values,
    pick_latent_family,
)
from megatron.grpo.presets import ModelPreset

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    **LATENT_FAMILIES,
}
"""model_type of a text config -> the transformers class that it is the config of."""

_MULTIMODAL = "qwen3_5"

# Keys that published config.json files carry and transformers' config classes do not: they change nothing here.
_WITHOUT_EFFECT = {
    "torch_dtype", "rope_theta", "rope_scaling", "partial_rotary_factor", "full_attention_interval",
    "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "is_llama_config", "transformers.js_config",
    "unsloth_fixed", "unsloth_version", "unsloth_fixed_mtp", "language_model_only", "unk_token_id", "sep_token_id",
    "decoder_start_token_id", "tokenizer_class", "is_decoder", "add_cross_attention", "tie_encoder_decoder",
    "torchscript", "use_bfloat16", "pruned_heads", "task_specific_params", "finetuning_task", "prefix",
}  # fmt: skip

# Key -> the values that the Megatron modules express; a key that is absent has the first.
_ONLY_VALUES: dict[str, tuple] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "sliding_window": (None,),
    "rope_interleaved": (False,),
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu"),
    "mamba_ssm_dtype": ("float32",),
    "quantization_config": (None,),
}

_LATENT_MARKS = {
    "qk_layernorm", "multi_latent_attention", "sparse_attention", "experts", "sigmoid_router", "expert_bias", "shared_experts"
}  # fmt: skip

_LINEAR = ("key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads", "conv_kernel_dim")


def preset_from_hf_config(config: dict[str, Any], *, name: str = "hf-model", ignore: tuple[str, ...] = ()) -> ModelPreset:
    """The preset of the model that transformers would build from a config.json.

    config: the file's content; of a multimodal Qwen3.5 the text model is taken. name: of the preset. ignore: unknown
    keys that the caller has checked to change nothing.
    Raises ValueError, in one sentence that names the key, where the Megatron modules cannot express the model.
    """
    text, model_type = _text_config(config)
    full = _fill_defaults(text, model_type, ignore)
    latent = model_type in LATENT_FAMILIES
    for key, allowed in (_ONLY_VALUES | (only_values(model_type) if latent else {})).items():
        if full.get(key, allowed[0]) not in allowed:
            raise ValueError(f"config.json: {key} {full[key]!r} is not supported, only {' or '.join(map(repr, allowed))}")
    hybrid = model_type == "qwen3_5_text"
    rotary_base, rotary_percent = _rotary(full["rope_parameters"], partial_allowed=hybrid)
    fields = dict(
        name=name,
        num_layers=full["num_hidden_layers"],
        hidden_size=full["hidden_size"],
        ffn_hidden_size=full["intermediate_size"],
        num_attention_heads=full["num_attention_heads"],
        num_query_groups=full["num_key_value_heads"],
        kv_channels=full["head_dim"],
        vocab_size=full["vocab_size"],
        max_position_embeddings=full["max_position_embeddings"],
        rotary_base=rotary_base,
        rotary_percent=rotary_percent,
        layernorm_epsilon=full["rms_norm_eps"],
        init_method_std=full["initializer_range"],
        qk_layernorm=model_type != "llama",
        zero_centered_norm=hybrid,
        tied_embeddings=config.get("tie_word_embeddings", full["tie_word_embeddings"]),
        attention_output_gate=hybrid,
    )
    if latent:
        return ModelPreset(**fields | latent_fields(full, model_type))
    layer_types = full.get("layer_types") or ["full_attention"] * full["num_hidden_layers"]
    if hybrid:
        fields |= {f"linear_{part}": full[f"linear_{part}"] for part in _LINEAR}
        fields["linear_attention_freq"] = _attention_frequency(layer_types)
    elif set(layer_types) != {"full_attention"}:
        raise ValueError(f"config.json: layer_types {sorted(set(layer_types))} is not supported, only 'full_attention'")
    return ModelPreset(**fields)


def hf_config_from_preset(preset: ModelPreset, *, dtype: str, source: dict[str, Any] | None = None) -> dict[str, Any]:
    """The config.json that makes transformers build the preset's model.

    dtype: of the weights, e.g. "bfloat16". source: a config.json of the same model, whose token ids (and multimodal
    rotary sections, which text positions do not feel) are kept. Raises ValueError where no supported family has the
    preset's architecture.
    """
    model_type = pick_family(preset)
    rotary: dict[str, Any] = {"rope_type": "default", "rope_theta": float(preset.rotary_base)}
    config: dict[str, Any] = {
        "architectures": [FAMILIES[model_type]],
        "model_type": model_type,
        "num_hidden_layers": preset.num_layers,
        "hidden_size": preset.hidden_size,
        "intermediate_size": preset.ffn_hidden_size,
        "num_attention_heads": preset.num_attention_heads,
        "num_key_value_heads": preset.num_query_groups,
        "head_dim": preset.kv_channels,
        "vocab_size": preset.vocab_size,
        "max_position_embeddings": preset.max_position_embeddings,
        "rope_parameters": rotary,
        "rms_norm_eps": preset.layernorm_epsilon,
        "initializer_range": preset.init_method_std,
        "tie_word_embeddings": preset.tied_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        "dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if model_type == "qwen3_5_text":
        rotary["partial_rotary_factor"] = preset.rotary_percent
        config |= {f"linear_{part}": getattr(preset, f"linear_{part}") for part in _LINEAR}
        every = preset.linear_attention_freq
        config["layer_types"] = [
            "linear_attention" if (layer + 1) % every else "full_attention" for layer in range(preset.num_layers)
        ]
    elif model_type in LATENT_FAMILIES:
        config |= latent_hf_fields(preset)
    source_text = _text_config(source)[0] if source else {}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        config[key] = source_text.get(key, (source or {}).get(key))
    for key in ("mrope_section", "mrope_interleaved"):
        if key in (source_text.get("rope_parameters") or {}):
            rotary[key] = source_text["rope_parameters"][key]
    return config


def pick_family(preset: ModelPreset) -> str:
    """The model_type whose transformers class computes what the preset's Megatron model computes.

    Raises ValueError where there is none, naming the fields that no family combines.
    """
    marks = dict(
        hybrid=preset.hybrid, attention_output_gate=preset.attention_output_gate,
        zero_centered_norm=preset.zero_centered_norm, qk_layernorm=preset.qk_layernorm,
        partial_rotary=preset.rotary_percent != 1.0, qkv_bias=preset.qkv_bias,
        multi_latent_attention=preset.multi_latent_attention, sparse_attention=preset.sparse, experts=preset.has_experts,
    )  # fmt: skip
    if preset.has_experts:
        marks |= dict(
            sigmoid_router=preset.moe_router_score_function == "sigmoid", expert_bias=preset.moe_router_enable_expert_bias,
            shared_experts=preset.moe_shared_expert_intermediate_size is not None,
        )  # fmt: skip
    on = {mark for mark, present in marks.items() if present}
    if on - {"partial_rotary"} == {"hybrid", "attention_output_gate", "zero_centered_norm", "qk_layernorm"}:
        return "qwen3_5_text"
    if on == _LATENT_MARKS:
        return pick_latent_family(preset)
    if on == {"qk_layernorm"}:
        return "qwen3"
    if not on:
        return "llama"
    raise ValueError(
        f"--model-preset {preset.name} has no Hugging Face family among {', '.join(FAMILIES.values())}: none combines "
        f"{', '.join(sorted(on))}"
    )


def count_next_token_layers(config: dict[str, Any]) -> int:
    """How many next-token-prediction layers a config.json declares after the decoder's own (GLM and DeepSeek)."""
    text, model_type = _text_config(config)
    return int(text.get(NEXT_TOKEN_LAYERS) or 0) if model_type in LATENT_FAMILIES else 0


def left_out_of_config(config: dict[str, Any]) -> dict[str, str]:
    """What a config.json describes beside the text model -> why it is not converted."""
    text, _ = _text_config(config)
    out = {}
    if config.get("vision_config"):
        out["vision_config"] = "the vision tower is not converted"
    for key in ("mtp_num_hidden_layers", NEXT_TOKEN_LAYERS):
        if text.get(key):
            out[key] = "next-token-prediction layers are not converted"
    return out


def _text_config(config: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The text model's part of a config.json and its model_type."""
    model_type = config.get("model_type")
    if config.get("quantization_config") is not None:
        raise ValueError("config.json: quantization_config is not supported; convert the unquantised checkpoint")
    if model_type == _MULTIMODAL and isinstance(config.get("text_config"), dict):
        return config["text_config"], "qwen3_5_text"
    if model_type not in FAMILIES:
        raise ValueError(
            f"config.json: model_type {model_type!r} is not supported; supported are {', '.join([*FAMILIES, _MULTIMODAL])}"
        )
    return config, model_type


def _fill_defaults(text: dict[str, Any], model_type: str, ignore: tuple[str, ...]) -> dict[str, Any]:
    """The text config with transformers' defaults; refuses keys that nobody knows."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    known = set(config_class().to_dict()) | _WITHOUT_EFFECT | set(_ONLY_VALUES) | set(ignore)
    if model_type in LATENT_FAMILIES:
        known |= KNOWN_KEYS | set(only_values(model_type))
    unknown = sorted(key for key in set(text) - known if not key.startswith("_"))
    if unknown:
        raise ValueError(
            f"config.json: {', '.join(unknown)} of this {FAMILIES[model_type]} is not known and may change the model; "
            "if it does not, name it in --ignore-config-keys"
        )
    try:
        return config_class(**text).to_dict()
    except StrictDataclassError as error:
        raise ValueError(f"config.json: {' '.join(str(error).split())}") from error


def _rotary(rope: dict[str, Any], *, partial_allowed: bool) -> tuple[int, float]:
    """(base, share of the head that turns) of transformers' rope_parameters."""
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"config.json: rope_type {rope['rope_type']!r} is not supported, only 'default' (no scaling)")
    unknown = set(rope) - {"rope_type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
    if unknown:
        raise ValueError(f"config.json: rope_parameters {', '.join(sorted(unknown))} is not supported")
    base, percent = rope["rope_theta"], rope.get("partial_rotary_factor", 1.0)
    if base != int(base):
        raise ValueError(f"config.json: rope_theta {base} is not supported, only a whole number")
    if percent != 1.0 and not partial_allowed:
        raise ValueError(f"config.json: partial_rotary_factor {percent} is not supported in this family")
    return int(base), percent


def _attention_frequency(layer_types: list[str]) -> int:
    """N where every N-th layer, and no other, is full attention."""
    unknown = set(layer_types) - {"linear_attention", "full_attention"}
    every = layer_types.index("full_attention") + 1 if "full_attention" in layer_types else len(layer_types) + 1
    expected = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(len(layer_types))]
    if unknown or layer_types != expected:
        raise ValueError("config.json: layer_types is not supported: every N-th layer must be full attention and no other")
    return every
