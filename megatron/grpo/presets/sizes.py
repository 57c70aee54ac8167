"""Which sizes of one model contradict each other, whatever it is cut into."""

from megatron.grpo.presets.model_preset import ModelPreset


def find_bad_sizes(preset: ModelPreset) -> list[str]:
    """One sentence, naming the flags, for each contradiction; every number is taken to be in its own range."""
    found = []
    if preset.num_attention_heads % preset.num_query_groups:
        found.append(
            f"--num-query-groups {preset.num_query_groups} does not divide --num-attention-heads "
            f"{preset.num_attention_heads}"
        )
    flag = "qk_pos_emb_head_dim" if preset.multi_latent_attention else "kv_channels"
    channels = int(getattr(preset, flag) * preset.rotary_percent)
    if channels < 2 or channels % 2:
        found.append(
            f"--{flag.replace('_', '-')} {getattr(preset, flag)} x --rotary-percent {preset.rotary_percent} leaves "
            f"{channels} channels to rotary angles, which turn pairs: an even number, at least 2"
        )
    if preset.hybrid:
        found += _find_bad_linear_sizes(preset)
    if (preset.moe_router_num_groups is None) != (preset.moe_router_group_topk is None):
        found.append("--moe-router-num-groups and --moe-router-group-topk need each other")
    for name in ("linear_attention_freq", "moe_layer_freq"):
        found += _judge_pattern(name, getattr(preset, name))
    return found


def _find_bad_linear_sizes(preset: ModelPreset) -> list[str]:
    found, freq = [], preset.linear_attention_freq
    if preset.linear_num_value_heads % preset.linear_num_key_heads:
        found.append(
            f"--linear-num-key-heads {preset.linear_num_key_heads} does not divide --linear-num-value-heads "
            f"{preset.linear_num_value_heads}"
        )
    if isinstance(freq, (list, tuple)) and len(freq) != preset.num_layers:
        found.append(
            f"--linear-attention-freq names {len(freq)} layers, but --num-layers is {preset.num_layers}"
        )
    return found


def _judge_pattern(name: str, freq) -> list[str]:
    """A layer pattern is a number, or 0 and 1 for each layer."""
    if freq is None or isinstance(freq, int) or all(kind in (0, 1) for kind in freq):
        return []
    return [f"--{name.replace('_', '-')} {list(freq)} holds something other than 0 and 1"]
