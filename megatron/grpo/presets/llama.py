"""Dense decoders of Llama's shape: grouped queries, tied embeddings."""

from megatron.grpo.presets.model_preset import ModelPreset

_LLAMA = dict(kv_channels=64, layernorm_epsilon=1e-5, tied_embeddings=True)

LLAMA_PRESETS = (
    ModelPreset(
        name="tiny-llama",
        num_layers=4, hidden_size=128, ffn_hidden_size=256, num_attention_heads=4, num_query_groups=2,
        vocab_size=128, max_position_embeddings=65_536, **(_LLAMA | dict(kv_channels=32)),
    ),
    ModelPreset(
        name="smollm2-135m",
        num_layers=30, hidden_size=576, ffn_hidden_size=1536, num_attention_heads=9, num_query_groups=3,
        vocab_size=49_152, max_position_embeddings=8_192, rotary_base=100_000, **_LLAMA,
    ),
)
