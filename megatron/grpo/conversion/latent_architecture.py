"""The config.json fields of latent attention with selected positions and experts: GLM-5.x and DeepSeek-V3.2.

transformers builds both families of the same parts. They differ in the rotary layout of the indexer, and GLM-5.2 alone
selects in some layers only ("full"), whose selection the layers after them take over ("shared").

Left out: YaRN, without which the published DeepSeek-V3.2 is another model, and the next-token-prediction layers.
"""

from typing import Any

from megatron.grpo.presets import ModelPreset

LATENT_FAMILIES = {"glm_moe_dsa": "GlmMoeDsaForCausalLM", "deepseek_v32": "DeepseekV32ForCausalLM"}
"""model_type -> the transformers class that it is the config of."""

NEXT_TOKEN_LAYERS = "num_nextn_predict_layers"

KNOWN_KEYS = {
    "index_topk_freq", "index_skip_topk_offset", "index_topk_pattern", "index_share_for_mtp_iteration",
    NEXT_TOKEN_LAYERS, "ep_size", "aux_loss_alpha", "seq_aux", "router_aux_loss_coef",
}  # fmt: skip
"""Keys of published files beside those of transformers' classes: mapped here, or without effect on the loss of GRPO."""

_ONLY_VALUES: dict[str, tuple] = {
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "moe_layer_freq": (1,),
    "moe_router_dtype": ("float32", None),
    "pretraining_tp": (1, None),
    "rope_interleave": (True,),
}

# The norms of the latents and of the index keys, which transformers does not read from config.json.
_EPSILON = 1e-6

# A head of transformers' expert groups scores by its two best experts; Megatron's by its topk / group_topk best.
_EXPERTS_THAT_SCORE_A_GROUP = 2

_SAME_NAME = ("q_lora_rank", "kv_lora_rank", "v_head_dim")
_RENAMED = {
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "index_n_heads": "dsa_indexer_n_heads",
    "index_head_dim": "dsa_indexer_head_dim",
    "index_topk": "dsa_indexer_topk",
    "n_routed_experts": "num_experts",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "num_experts_per_tok": "moe_router_topk",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
}


def only_values(model_type: str) -> dict[str, tuple]:
    """Key -> the values that the Megatron modules express in a family; a key that is absent has the first."""
    return _ONLY_VALUES | {"indexer_rope_interleave": (model_type == "glm_moe_dsa",)}


def selects(preset: ModelPreset, layer: int) -> bool:
    """Whether a layer (counted from 0) has an indexer of its own."""
    kinds = _schedule(preset.num_layers, preset.dsa_indexer_topk_freq, preset.dsa_indexer_skip_topk_offset)
    return kinds[layer] == "full"


def has_experts(preset: ModelPreset, layer: int) -> bool:
    """Whether a layer (counted from 0) has routed experts instead of one MLP."""
    frequency = preset.moe_layer_freq
    return preset.has_experts and (layer % frequency == 0 if isinstance(frequency, int) else bool(frequency[layer]))


def latent_fields(config: dict[str, Any], model_type: str) -> dict[str, Any]:
    """ModelPreset's fields of latent attention, selection and experts, from a config.json with transformers' defaults.

    Raises ValueError, in one sentence that names the key, where the Megatron modules cannot express them.
    """
    _check_attention(config)
    _check_experts(config)
    frequency, offset = _selection_schedule(config)
    groups = dict(moe_router_num_groups=config["n_group"], moe_router_group_topk=config["topk_group"])
    return dict(
        {name: config[name] for name in _SAME_NAME},
        **{ours: config[theirs] for theirs, ours in _RENAMED.items()},
        **(groups if config["n_group"] > 1 else {}),
        multi_latent_attention=True,
        kv_channels=config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        qk_layernorm=True,
        latent_norm_epsilon=_EPSILON,
        dsa_indexer_k_norm_epsilon=_EPSILON,
        dsa_indexer_rope_interleaved=model_type == "glm_moe_dsa",
        dsa_indexer_topk_freq=frequency,
        dsa_indexer_skip_topk_offset=offset,
        moe_layer_freq=tuple(int(kind == "sparse") for kind in config["mlp_layer_types"]),
        moe_shared_expert_intermediate_size=config["n_shared_experts"] * config["moe_intermediate_size"],
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    )


def latent_hf_fields(preset: ModelPreset) -> dict[str, Any]:
    """The config.json fields of a preset's latent attention, selection and experts, as published files have them."""
    kinds = ["sparse" if has_experts(preset, layer) else "dense" for layer in range(preset.num_layers)]
    fields = {theirs: getattr(preset, ours) for theirs, ours in _RENAMED.items()}
    fields |= {name: getattr(preset, name) for name in _SAME_NAME}
    fields |= {key: allowed[0] for key, allowed in _ONLY_VALUES.items()}
    fields |= {
        "head_dim": preset.qk_pos_emb_head_dim,
        "qk_head_dim": preset.qk_head_dim + preset.qk_pos_emb_head_dim,
        "indexer_rope_interleave": preset.dsa_indexer_rope_interleaved,
        "n_shared_experts": preset.moe_shared_expert_intermediate_size // preset.moe_ffn_hidden_size,
        "n_group": preset.moe_router_num_groups or 1,
        "topk_group": preset.moe_router_group_topk or 1,
        "mlp_layer_types": kinds,
        "first_k_dense_replace": (kinds + ["sparse"]).index("sparse"),
        "mlp_bias": False,
        NEXT_TOKEN_LAYERS: 0,
    }
    if preset.moe_router_topk_scaling_factor is None:
        fields["routed_scaling_factor"] = 1.0
    if preset.dsa_indexer_rope_interleaved:
        frequency, offset = preset.dsa_indexer_topk_freq, preset.dsa_indexer_skip_topk_offset
        fields |= {
            "index_topk_freq": frequency,
            "index_skip_topk_offset": max(offset, 1),
            "indexer_types": _schedule(preset.num_layers, frequency, offset),
        }
    return fields


def pick_latent_family(preset: ModelPreset) -> str:
    """The model_type of a preset that has all parts of these families.

    Raises ValueError, naming the fields, where transformers fixes one of them to another value.
    """
    fixed = {
        "latent_norm_epsilon": _EPSILON,
        "dsa_indexer_k_norm_epsilon": _EPSILON,
        "num_query_groups": preset.num_attention_heads,
        "kv_channels": preset.qk_head_dim + preset.qk_pos_emb_head_dim,
    }
    if not preset.dsa_indexer_rope_interleaved:
        fixed["dsa_indexer_topk_freq"] = 1
    differ = {name: value for name, value in fixed.items() if getattr(preset, name) != value}
    other = [f"{name} {getattr(preset, name)} instead of {value}" for name, value in differ.items()]
    if preset.moe_shared_expert_intermediate_size % preset.moe_ffn_hidden_size:
        other.append("moe_shared_expert_intermediate_size that is no multiple of moe_ffn_hidden_size")
    topk, group_topk = preset.moe_router_topk, preset.moe_router_group_topk
    if preset.moe_router_num_groups is not None and topk // group_topk != _EXPERTS_THAT_SCORE_A_GROUP:
        other.append(f"moe_router_topk {topk} / moe_router_group_topk {group_topk} other than {_EXPERTS_THAT_SCORE_A_GROUP}")
    if topk < 2:
        other.append(f"moe_router_topk {topk}")
    if other:
        raise ValueError(f"--model-preset {preset.name} has no Hugging Face family: {'; '.join(other)}")
    return "glm_moe_dsa" if preset.dsa_indexer_rope_interleaved else "deepseek_v32"


def _refuse(what: str) -> None:
    raise ValueError(f"config.json: {what}")


def _check_attention(config: dict[str, Any]) -> None:
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    if heads != groups:
        _refuse(f"num_key_value_heads {groups} is not supported with latent attention, only all {heads}")
    width = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    if config["qk_head_dim"] != width:
        _refuse(f"qk_head_dim {config['qk_head_dim']} is not qk_nope_head_dim + qk_rope_head_dim ({width})")
    unknown = set(config["layer_types"]) - {"indexed_attention", "deepseek_sparse_attention"}
    if unknown:
        _refuse(f"layer_types {', '.join(sorted(unknown))} is not supported, only indexed_attention")


def _check_experts(config: dict[str, Any]) -> None:
    kinds, layers = config["mlp_layer_types"], config["num_hidden_layers"]
    if set(kinds) - {"dense", "sparse"} or len(kinds) != layers or "sparse" not in kinds:
        _refuse(f"mlp_layer_types must call each of the {layers} layers dense or sparse, and at least one sparse")
    topk, groups, group_topk = config["num_experts_per_tok"], config["n_group"], config["topk_group"]
    if topk < 2:
        _refuse(f"num_experts_per_tok {topk} is not supported: Megatron does not normalise a single expert's weight")
    if groups > 1 and topk // group_topk != _EXPERTS_THAT_SCORE_A_GROUP:
        _refuse(
            f"topk_group {group_topk} of n_group {groups} is not supported with num_experts_per_tok {topk}: Megatron "
            f"scores a group by its {topk // group_topk} best experts, not by {_EXPERTS_THAT_SCORE_A_GROUP}"
        )
    if config["n_shared_experts"] < 1:
        _refuse(f"n_shared_experts {config['n_shared_experts']} is not supported, only 1 or more")
    if not config["routed_scaling_factor"] > 0:
        _refuse(f"routed_scaling_factor {config['routed_scaling_factor']} is not supported, only a positive one")


def _schedule(layers: int, frequency: int, offset: int) -> list[str]:
    """The kind of each layer: the first `offset` layers (at least one) select, then one layer in `frequency`."""
    return ["shared" if max(layer + 1 - max(offset, 1), 0) % frequency else "full" for layer in range(layers)]


def _selection_schedule(config: dict[str, Any]) -> tuple[int, int]:
    """(frequency, offset) of the layers that select; (1, 0) where all do."""
    layers = config["num_hidden_layers"]
    kinds = config.get("indexer_types") or ["full"] * layers
    pattern = config.get("index_topk_pattern")
    if pattern is not None and list(pattern) != [kind[0].upper() for kind in kinds] and list(pattern) != kinds:
        _refuse(f"index_topk_pattern {pattern!r} and the layers that transformers lets select disagree")
    declared = config.get("index_topk_freq")
    if declared is not None and pattern is None:
        frequency, offset = max(declared, 1), config.get("index_skip_topk_offset", 2)
        if _schedule(layers, frequency, offset) != kinds:
            _refuse(
                f"index_topk_freq {declared} with index_skip_topk_offset {offset} and the layers that transformers lets "
                "select disagree"
            )
    elif "shared" in kinds:
        offset = kinds.index("shared")
        frequency = kinds.index("full", offset) - offset + 1 if "full" in kinds[offset:] else layers
    else:
        frequency, offset = 1, 0
    if offset < 1 < frequency or _schedule(layers, frequency, offset) != kinds:
        _refuse("indexer_types must be full in the first layers and then in every N-th layer, and shared elsewhere")
    return (frequency, offset) if frequency > 1 else (1, 0)
