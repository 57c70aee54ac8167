"""In which range the number behind a flag must lie, one flag at a time.

Only flags given on the command line are looked at: what a preset or Megatron sets is in range. What depends on another
flag, and the ranges of our own settings, are elsewhere: `flag_policy`, `presets.checks`, the config classes. That a
float is finite is asked of every flag.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Range:
    """What a number must be, in words and as a predicate, and the destinations that it holds for."""

    words: str
    holds: Callable[[float], bool]
    names: str


LONGEST_TIMEOUT = 366 * 24 * 60
"""Minutes, a year: far longer ones overflow in the back ends."""

RANGES = (
    Range(words="at least 1", holds=lambda number: number >= 1, names="""
        num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels vocab_size
        make_vocab_size_divisible_by max_position_embeddings rotary_base
        linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads
        linear_num_value_heads
        q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
        dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_topk_freq
        num_experts moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_router_topk
        moe_router_num_groups moe_router_group_topk
        lr_decay_iters lr_wsd_decay_iters tensorboard_queue_size
    """),
    Range(words="at least 0", holds=lambda number: number >= 0, names="""
        lr min_lr decoupled_lr decoupled_min_lr lr_warmup_iters lr_warmup_init
        weight_decay start_weight_decay end_weight_decay clip_grad ckpt_step dsa_indexer_skip_topk_offset
        dsa_indexer_loss_coeff logging_level
    """),
    Range(words="above 0", holds=lambda number: number > 0, names="""
        init_method_std layernorm_epsilon adam_eps dsa_indexer_k_norm_epsilon moe_router_topk_scaling_factor
    """),
    Range(words="in [0, 1)", holds=lambda number: 0 <= number < 1, names="adam_beta1 adam_beta2 lr_warmup_fraction"),
    Range(words="in (0, 1]", holds=lambda number: 0 < number <= 1, names="rotary_percent"),
    Range(words="between 0 and 2^63 - 1", holds=lambda number: 0 <= number < 2**63, names="seed"),
    Range(words=f"between 1 and {LONGEST_TIMEOUT}, a year", holds=lambda number: 1 <= number <= LONGEST_TIMEOUT,
          names="distributed_timeout_minutes"),
)
_RANGE_OF = {name: each for each in RANGES for name in each.names.split()}


def find_bad_numbers(explicit: Mapping[str, object], spelling: Mapping[str, str]) -> dict[str, str]:
    """Destination -> one sentence, for each flag whose number is not finite or out of its range.

    explicit: destination -> value, of the flags on the command line. spelling: destination -> the flag as typed.
    """
    found = {}
    for name, value in explicit.items():
        numbers = value if isinstance(value, (list, tuple)) else [value]
        wrong = [number for number in numbers if isinstance(number, float) and not math.isfinite(number)]
        if wrong:
            found[name] = f"{spelling[name]} must be finite, not {wrong[0]}"
        elif isinstance(value, (int, float)) and name in _RANGE_OF and not _RANGE_OF[name].holds(value):
            found[name] = f"{spelling[name]} must be {_RANGE_OF[name].words}, not {value}"
    return found
