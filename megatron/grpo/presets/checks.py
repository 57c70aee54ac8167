"""Which parallel sizes a model can be cut into, and which of its sizes contradict each other."""

from megatron.grpo.presets.model_preset import ModelPreset


def check_divisible(preset: ModelPreset, sizes) -> None:
    """Raise ValueError, naming the flags, where a model cannot be cut by a parallel size, or its own sizes disagree.

    sizes: anything with Megatron's `tensor_model_parallel_size`, `context_parallel_size` and
    `expert_model_parallel_size`.
    """
    tp, cp, ep = sizes.tensor_model_parallel_size, sizes.context_parallel_size, sizes.expert_model_parallel_size
    if preset.num_attention_heads % tp or preset.num_query_groups % tp:
        raise ValueError(
            f"--tensor-model-parallel-size {tp} does not divide the {preset.num_attention_heads} query heads and "
            f"{preset.num_query_groups} key/value heads of --model-preset {preset.name}"
        )
    if preset.hybrid and preset.linear_num_key_heads % (tp * cp):
        raise ValueError(
            f"--tensor-model-parallel-size {tp} x --context-parallel-size {cp} does not divide the "
            f"{preset.linear_num_key_heads} gated delta net key heads of --model-preset {preset.name}"
        )
    if tp > 1 and (preset.multi_latent_attention or preset.has_experts):
        kind = "latent attention" if preset.multi_latent_attention else "experts"
        raise ValueError(
            f"--tensor-model-parallel-size {tp} is not supported with the {kind} of --model-preset {preset.name}: use "
            "--context-parallel-size and --expert-model-parallel-size"
        )
    _check_selection(preset)
    _check_experts(preset, ep)


def _check_selection(preset: ModelPreset) -> None:
    if not preset.sparse:
        return
    if preset.dsa_indexer_head_dim < preset.qk_pos_emb_head_dim:
        raise ValueError(
            f"--dsa-indexer-head-dim {preset.dsa_indexer_head_dim} is below --qk-pos-emb-head-dim "
            f"{preset.qk_pos_emb_head_dim}, the rotary part of an index head"
        )
    for name in ("dsa_indexer_n_heads", "dsa_indexer_topk", "dsa_indexer_topk_freq"):
        if getattr(preset, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(preset, name)}")


def _check_experts(preset: ModelPreset, ep: int) -> None:
    if not preset.has_experts:
        if ep > 1:
            raise ValueError(f"--expert-model-parallel-size {ep}: --model-preset {preset.name} has no experts")
        return
    if preset.num_experts % ep:
        raise ValueError(f"--expert-model-parallel-size {ep} does not divide --num-experts {preset.num_experts}")
    if not 1 <= preset.moe_router_topk <= preset.num_experts:
        raise ValueError(
            f"--moe-router-topk {preset.moe_router_topk} does not lie between 1 and --num-experts {preset.num_experts}"
        )
    groups, group_topk = preset.moe_router_num_groups, preset.moe_router_group_topk
    if groups is not None and preset.num_experts % groups:
        raise ValueError(f"--moe-router-num-groups {groups} does not divide --num-experts {preset.num_experts}")
    if groups is not None and preset.num_experts // groups * group_topk < preset.moe_router_topk:
        raise ValueError(
            f"--moe-router-group-topk {group_topk} of --moe-router-num-groups {groups} leaves fewer experts than "
            f"--moe-router-topk {preset.moe_router_topk}"
        )
    if not isinstance(preset.moe_layer_freq, int) and len(preset.moe_layer_freq) != preset.num_layers:
        raise ValueError(
            f"--moe-layer-freq names {len(preset.moe_layer_freq)} layers, but --num-layers is {preset.num_layers}"
        )
