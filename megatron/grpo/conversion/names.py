"""Which HF tensors make which Megatron parameter, for every parameter of a preset.

One list says everything about a checkpoint: names on both sides, shapes on the HF side, and the layout between them.
Import, export and the accounting of names all read it.

Left out: the vision tower and the next-token-prediction layers of Qwen3.5 (see `accounting`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.grpo.conversion.architecture import pick_family
from megatron.grpo.conversion.layouts import GroupedQKV, StackedRows
from megatron.grpo.presets import ModelPreset

TEXT_PREFIX = "model."
MULTIMODAL_PREFIX = "model.language_model."


@dataclass(frozen=True)
class ParameterMap:
    """One Megatron parameter (at TP 1, vocabulary not padded) and the HF tensors that it is made of.

    over_vocabulary: its rows are token ids, padded on the Megatron side.
    """

    megatron: str
    sources: tuple[tuple[str, tuple[int, ...]], ...]
    layout: StackedRows | GroupedQKV
    over_vocabulary: bool = False


def map_parameters(preset: ModelPreset, *, prefix: str = TEXT_PREFIX) -> list[ParameterMap]:
    """Every parameter of the preset's Megatron model, in the order of the layers.

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
    mc, hf, hidden, ffn = f"decoder.layers.{layer}.", f"{prefix}layers.{layer}.", preset.hidden_size, preset.ffn_hidden_size
    yield _same(f"{mc}input_layernorm.weight", f"{hf}input_layernorm.weight", (hidden,))
    linear = preset.hybrid and (layer + 1) % preset.linear_attention_freq != 0
    map_mixer = _map_gated_delta_net if linear else _map_attention
    yield from map_mixer(preset, f"{mc}self_attention.", hf)
    yield _same(f"{mc}pre_mlp_layernorm.weight", f"{hf}post_attention_layernorm.weight", (hidden,))
    gate_and_up = [(f"{hf}mlp.{name}_proj.weight", (ffn, hidden)) for name in ("gate", "up")]
    yield _stacked(f"{mc}mlp.linear_fc1.weight", *gate_and_up)
    yield _same(f"{mc}mlp.linear_fc2.weight", f"{hf}mlp.down_proj.weight", (hidden, ffn))


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
