"""A small model with latent attention for tests over many sizes: no experts, four layers, of which 1 and 3 select 5 keys."""

from dataclasses import replace
from functools import cache

import torch

from megatron.grpo.presets import ModelPreset, get_preset
from tests.support.models import ModelPair, build_pair, one_rank


def small_preset(**change) -> ModelPreset:
    """A quarter of tiny-glm5.2's width. change: fields of ModelPreset."""
    return replace(get_preset("tiny-glm5.2"), **dict(
        name="small-latent", num_layers=4, hidden_size=32, ffn_hidden_size=48, num_attention_heads=2, num_query_groups=2,
        vocab_size=32, q_lora_rank=16, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8, kv_channels=12,
        dsa_indexer_n_heads=2, dsa_indexer_head_dim=8, dsa_indexer_topk=5, dsa_indexer_topk_freq=2,
        dsa_indexer_skip_topk_offset=1, num_experts=None,
    ) | change)


@cache
def small_latent(dtype: torch.dtype = torch.float64, *, indexer_loss: float = 0.0, **change) -> ModelPair:
    """The pair of `small_preset` in this process alone, built once; indexer_loss: the coefficient."""
    return build_pair(small_preset(**change), dtype, one_rank(), indexer_loss=indexer_loss)
