"""Qwen3.6 (gated delta nets and full attention), Qwen3 (full attention), and Qwen3's mixture of experts."""

from dataclasses import replace

from megatron.grpo.presets.model_preset import ModelPreset

_TINY_QWEN36 = ModelPreset(
    name="tiny-qwen3.6",
    num_layers=4, hidden_size=128, ffn_hidden_size=256, num_attention_heads=4, num_query_groups=2, kv_channels=32,
    vocab_size=128, max_position_embeddings=65_536, rotary_base=10_000_000, rotary_percent=0.25, qk_layernorm=True,
    zero_centered_norm=True, attention_output_gate=True, init_method_std=0.1,
    linear_attention_freq=4, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=4,
    linear_num_value_heads=8, linear_conv_kernel_dim=4,
)

QWEN_PRESETS = (
    _TINY_QWEN36,
    replace(_TINY_QWEN36, name="tiny-qwen3.6-8layer", num_layers=8),
    ModelPreset(
        name="qwen3.6-27b",
        num_layers=64, hidden_size=5120, ffn_hidden_size=17_408, num_attention_heads=24, num_query_groups=4,
        kv_channels=256, vocab_size=248_320, max_position_embeddings=4_456_448, rotary_base=10_000_000,
        rotary_percent=0.25, qk_layernorm=True, zero_centered_norm=True, attention_output_gate=True,
        linear_attention_freq=4, linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16,
        linear_num_value_heads=48, linear_conv_kernel_dim=4,
    ),
    ModelPreset(
        name="tiny-qwen3",
        num_layers=4, hidden_size=128, ffn_hidden_size=256, num_attention_heads=4, num_query_groups=2, kv_channels=32,
        vocab_size=128, max_position_embeddings=65_536, rotary_base=1_000_000, qk_layernorm=True,
    ),
    ModelPreset(
        name="tiny-qwen3-moe",
        num_layers=4, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, num_query_groups=2, kv_channels=16,
        vocab_size=128, max_position_embeddings=65_536, rotary_base=1_000_000, qk_layernorm=True, init_method_std=0.1,
        num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=32,
    ),
)
