"""GLM-5.2, and DeepSeek-V3.2 of the same kind: latent attention over selected positions, fine-grained experts.

The first layers are dense; the others have routed experts and one shared expert. GLM-5.2 selects in one layer of four
and lets the three after it use the selection; DeepSeek-V3.2 selects in every layer and routes within groups of experts.
"""

from dataclasses import replace

from megatron.grpo.presets.model_preset import ModelPreset

_EXPERTS = dict(
    moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_topk_scaling_factor=2.5
)
_LATENT = dict(
    multi_latent_attention=True, qk_layernorm=True, layernorm_epsilon=1e-5, latent_norm_epsilon=1e-6,
    dsa_indexer_rope_interleaved=True, dsa_indexer_k_norm_epsilon=1e-6,
)

_TINY_GLM52 = ModelPreset(
    name="tiny-glm5.2",
    num_layers=8, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, num_query_groups=4, kv_channels=24,
    vocab_size=128, max_position_embeddings=131_072, rotary_base=8_000_000, init_method_std=0.15,
    q_lora_rank=32, kv_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=16,
    dsa_indexer_n_heads=8, dsa_indexer_head_dim=16, dsa_indexer_topk=8, dsa_indexer_topk_freq=4,
    dsa_indexer_skip_topk_offset=3,  # layers 1, 2, 3 and 7 select
    num_experts=16, moe_router_topk=4, moe_layer_freq=(0,) + (1,) * 7, moe_ffn_hidden_size=32,
    moe_shared_expert_intermediate_size=32, **_LATENT, **_EXPERTS,
)

GLM_PRESETS = (
    _TINY_GLM52,
    ModelPreset(
        name="glm-5.2",
        num_layers=78, hidden_size=6144, ffn_hidden_size=12_288, num_attention_heads=64, num_query_groups=64,
        kv_channels=256, vocab_size=154_880, max_position_embeddings=2_113_536, rotary_base=8_000_000,
        q_lora_rank=2048, kv_lora_rank=512, qk_head_dim=192, qk_pos_emb_head_dim=64, v_head_dim=256,
        dsa_indexer_n_heads=32, dsa_indexer_head_dim=128, dsa_indexer_topk=2048, dsa_indexer_topk_freq=4,
        dsa_indexer_skip_topk_offset=3,
        num_experts=256, moe_router_topk=8, moe_layer_freq=(0,) * 3 + (1,) * 75, moe_ffn_hidden_size=2048,
        moe_shared_expert_intermediate_size=2048, **_LATENT, **_EXPERTS,
    ),
    replace(
        _TINY_GLM52, name="tiny-deepseek-v3.2", num_layers=4, moe_layer_freq=(0, 1, 1, 1), layernorm_epsilon=1e-6,
        rotary_base=10_000, dsa_indexer_topk_freq=1, dsa_indexer_skip_topk_offset=0, dsa_indexer_rope_interleaved=False,
        moe_router_num_groups=4, moe_router_group_topk=2,
    ),
)
