"""Which HF tensors make which Megatron parameter, for every parameter of a preset.

One list says everything about a checkpoint: names on both sides, shapes on the HF side, and the layout between them.
Import, export and the accounting of names all read it.

Experts stand one by one on both sides, which is how published checkpoints store them (transformers fuses them in memory
alone).

Left out: the vision tower of Qwen3.5 and next-token-prediction layers (see `accounting`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from longstraw.rollout.row_layouts import GroupedQKV, StackedRows
from megatron.grpo.conversion.architecture import pick_family
from megatron.grpo.conversion.latent_architecture import has_experts, selects
from megatron.grpo.presets import ModelPreset

TEXT_PREFIX = "model."
MULTIMODAL_PREFIX = "model.language_model."


@dataclass(frozen=True)
class ParameterMap:
    """One Megatron parameter (at TP 1 and EP 1, vocabulary not padded) and the HF tensors that it is made of.

    over_vocabulary: its rows are token ids, padded on the Megatron side. expert: the number of the routed expert that it
    belongs to.
    """

    megatron: str
    sources: tuple[tuple[str, tuple[int, ...]], ...]
    layout: StackedRows | GroupedQKV
    over_vocabulary: bool = False
    expert: int | None = None

    def name_for_expert(self, number: int | str) -> str:
        """The Megatron name of the same parameter of another expert."""
        return self.megatron.replace(f".local_experts.{self.expert}.", f".local_experts.{number}.")


def map_parameters(preset: ModelPreset, *, prefix: str = TEXT_PREFIX) -> list[ParameterMap]:
    """Every parameter (and expert bias, a buffer) of the preset's Megatron model, in the order of the layers.

    prefix: of the decoder's names on the HF side: `TEXT_PREFIX`, or `MULTIMODAL_PREFIX` in multimodal checkpoints.
    Raises ValueError where no supported family has the preset's architecture.
    """
    pick_family(preset)
    vocabulary = (preset.vocab_size, preset.hidden_size)
    maps = [_same("embedding.word_embeddings.weight", f"{prefix}embed_tokens.weight", vocabulary, over_vocabulary=True)]
    for layer in range(preset.num_layers):
        maps.extend(_map_layer(preset, layer, prefix))
    maps.append(_same("decoder.final_layernorm.weight", f"{prefix}norm.weight", (preset.hidden_size,)))
    if not preset.tied_embeddings:
        maps.append(_same("output_layer.weight", "lm_head.weight", vocabulary, over_vocabulary=True))
    return maps


def _same(megatron: str, hf: str, shape: tuple[int, ...], *, over_vocabulary: bool = False) -> ParameterMap:
    return ParameterMap(megatron, ((hf, shape),), StackedRows((shape[0],)), over_vocabulary)


def _stacked(megatron: str, *sources: tuple[str, tuple[int, ...]]) -> ParameterMap:
    return ParameterMap(megatron, sources, StackedRows(tuple(shape[0] for _, shape in sources)))


def _map_layer(preset: ModelPreset, layer: int, prefix: str) -> Iterator[ParameterMap]:
    mc, hf, hidden = f"decoder.layers.{layer}.", f"{prefix}layers.{layer}.", preset.hidden_size
    yield _same(f"{mc}input_layernorm.weight", f"{hf}input_layernorm.weight", (hidden,))
    if preset.multi_latent_attention:
        yield from _map_latent_attention(preset, f"{mc}self_attention.", f"{hf}self_attn.", selects(preset, layer))
    elif preset.hybrid and (layer + 1) % preset.linear_attention_freq != 0:
        yield from _map_gated_delta_net(preset, f"{mc}self_attention.", hf)
    else:
        yield from _map_attention(preset, f"{mc}self_attention.", hf)
    yield _same(f"{mc}pre_mlp_layernorm.weight", f"{hf}post_attention_layernorm.weight", (hidden,))
    if has_experts(preset, layer):
        yield from _map_experts(preset, f"{mc}mlp.", f"{hf}mlp.")
    else:
        yield from _map_mlp(f"{mc}mlp.", f"{hf}mlp.", hidden, preset.ffn_hidden_size)


def _map_mlp(mc: str, hf: str, hidden: int, ffn: int) -> Iterator[ParameterMap]:
    yield _stacked(f"{mc}linear_fc1.weight", *((f"{hf}{name}_proj.weight", (ffn, hidden)) for name in ("gate", "up")))
    yield _same(f"{mc}linear_fc2.weight", f"{hf}down_proj.weight", (hidden, ffn))


def _map_experts(preset: ModelPreset, mc: str, hf: str) -> Iterator[ParameterMap]:
    hidden, experts, ffn = preset.hidden_size, preset.num_experts, preset.moe_ffn_hidden_size
    yield _same(f"{mc}router.weight", f"{hf}gate.weight", (experts, hidden))
    if preset.moe_router_enable_expert_bias:
        yield _same(f"{mc}router.expert_bias", f"{hf}gate.e_score_correction_bias", (experts,))
    for expert in range(experts):
        for entry in _map_mlp(f"{mc}experts.local_experts.{expert}.", f"{hf}experts.{expert}.", hidden, ffn):
            yield replace(entry, expert=expert)
    if preset.moe_shared_expert_intermediate_size is not None:
        shared = preset.moe_shared_expert_intermediate_size
        yield from _map_mlp(f"{mc}shared_experts.", f"{hf}shared_experts.", hidden, shared)


def _map_latent_attention(preset: ModelPreset, mc: str, hf: str, has_indexer: bool) -> Iterator[ParameterMap]:
    hidden, heads = preset.hidden_size, preset.num_attention_heads
    queries, keys = preset.q_lora_rank, preset.kv_lora_rank
    plain, rotary, values = preset.qk_head_dim, preset.qk_pos_emb_head_dim, preset.v_head_dim
    yield _same(f"{mc}linear_q_down_proj.weight", f"{hf}q_a_proj.weight", (queries, hidden))
    yield _same(f"{mc}q_layernorm.weight", f"{hf}q_a_layernorm.weight", (queries,))
    yield _same(f"{mc}linear_q_up_proj.weight", f"{hf}q_b_proj.weight", (heads * (plain + rotary), queries))
    yield _same(f"{mc}linear_kv_down_proj.weight", f"{hf}kv_a_proj_with_mqa.weight", (keys + rotary, hidden))
    yield _same(f"{mc}kv_layernorm.weight", f"{hf}kv_a_layernorm.weight", (keys,))
    yield _same(f"{mc}linear_kv_up_proj.weight", f"{hf}kv_b_proj.weight", (heads * (plain + values), keys))
    yield _same(f"{mc}linear_proj.weight", f"{hf}o_proj.weight", (hidden, heads * values))
    if has_indexer:
        yield from _map_indexer(preset, f"{mc}core_attention.indexer.", f"{hf}indexer.")


def _map_indexer(preset: ModelPreset, mc: str, hf: str) -> Iterator[ParameterMap]:
    hidden, heads, width = preset.hidden_size, preset.dsa_indexer_n_heads, preset.dsa_indexer_head_dim
    yield _same(f"{mc}linear_wq_b.weight", f"{hf}wq_b.weight", (heads * width, preset.q_lora_rank))
    yield _same(f"{mc}linear_wk.weight", f"{hf}wk.weight", (width, hidden))
    yield _same(f"{mc}k_norm.weight", f"{hf}k_norm.weight", (width,))
    yield _same(f"{mc}k_norm.bias", f"{hf}k_norm.bias", (width,))
    yield _same(f"{mc}linear_weights_proj.weight", f"{hf}weights_proj.weight", (heads, hidden))


def _map_attention(preset: ModelPreset, mc: str, hf: str) -> Iterator[ParameterMap]:
    hf, hidden, head_dim = f"{hf}self_attn.", preset.hidden_size, preset.kv_channels
    heads, groups = preset.num_attention_heads, preset.num_query_groups
    q_rows = heads * head_dim * (2 if preset.attention_output_gate else 1)
    qkv = tuple((f"{hf}{n}_proj.weight", (rows, hidden)) for n, rows in zip("qkv", (q_rows, *[groups * head_dim] * 2)))
    yield ParameterMap(
        f"{mc}linear_qkv.weight", qkv, GroupedQKV(heads, groups, head_dim, preset.attention_output_gate)
    )
    if preset.qk_layernorm:
        yield _same(f"{mc}q_layernorm.weight", f"{hf}q_norm.weight", (head_dim,))
        yield _same(f"{mc}k_layernorm.weight", f"{hf}k_norm.weight", (head_dim,))
    yield _same(f"{mc}linear_proj.weight", f"{hf}o_proj.weight", (hidden, heads * head_dim))


def _map_gated_delta_net(preset: ModelPreset, mc: str, hf: str) -> Iterator[ParameterMap]:
    hf, hidden, heads = f"{hf}linear_attn.", preset.hidden_size, preset.linear_num_value_heads
    values = heads * preset.linear_value_head_dim
    channels = 2 * preset.linear_num_key_heads * preset.linear_key_head_dim + values
    # Megatron's rows: q k v z beta alpha; HF's four weights in that order are qkv, z, b, a.
    rows = {"qkv": channels, "z": values, "b": heads, "a": heads}
    yield _stacked(f"{mc}in_proj.weight", *((f"{hf}in_proj_{name}.weight", (n, hidden)) for name, n in rows.items()))
    yield _same(f"{mc}conv1d.weight", f"{hf}conv1d.weight", (channels, 1, preset.linear_conv_kernel_dim))
    yield _same(f"{mc}dt_bias", f"{hf}dt_bias", (heads,))
    yield _same(f"{mc}A_log", f"{hf}A_log", (heads,))
    yield _same(f"{mc}out_norm.weight", f"{hf}norm.weight", (preset.linear_value_head_dim,))
    yield _same(f"{mc}out_proj.weight", f"{hf}out_proj.weight", (hidden, values))
