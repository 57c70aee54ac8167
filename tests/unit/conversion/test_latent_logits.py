"""Converted latent-attention models compute what transformers computes: GLM-5.x and DeepSeek-V3.2.

Whole sequences through Megatron's own modules, and chunk by chunk through the engine.
"""

import dataclasses

import pytest
from conversion_models import (
    LATENT_CONFIGS,
    VOCABULARY,
    build_conventional,
    build_hf_model,
    build_pair,
    chunked_logits,
    draw_tokens,
    hf_logits,
    relative_error,
    share_weights,
    whole_sequence_logits,
)

from megatron.grpo.conversion.architecture import preset_from_hf_config
from megatron.grpo.conversion.hf_reader import HFReader
from megatron.grpo.conversion.weights import import_weights

LENGTH, CHUNKS = 61, (17, 61)
SPARSE, DENSE = {}, {"index_topk": 64}  # positions that a token reads: 7 of up to 61, or all


def convert(model, folder, groups):
    """(stateful, conventional) Megatron models of an HF model saved in several shards."""
    model.save_pretrained(folder, max_shard_size="60KB")
    with HFReader(folder) as reader:
        preset = preset_from_hf_config(reader.config)
        stateful, conventional = build_pair(preset, groups)
        import_weights(stateful, reader, preset)
    share_weights(stateful, conventional)
    return stateful, conventional


@pytest.mark.parametrize("selection", [SPARSE, DENSE], ids=["sparse", "all"])
@pytest.mark.parametrize("family", LATENT_CONFIGS)
def test_logits_equal_transformers(family, selection, groups, tmp_path):
    model, tokens = build_hf_model(family, **selection), draw_tokens(2, LENGTH)
    expected = hf_logits(model, tokens)
    stateful, conventional = convert(model, tmp_path / "hf", groups)
    found = {"whole": whole_sequence_logits(conventional, tokens)}
    found |= {f"chunks of {chunk}": chunked_logits(stateful, tokens, chunk) for chunk in CHUNKS}
    errors = {way: relative_error(logits[..., :VOCABULARY], expected) for way, logits in found.items()}
    assert max(errors.values()) <= 1e-5, errors
    assert not any(logits[..., VOCABULARY:].any() for logits in found.values()), "padding of the vocabulary has logits"


def test_the_selection_matters(groups, tmp_path):
    """What is compared above is sparse: with every position, the same weights give other logits."""
    model, tokens = build_hf_model("glm_moe_dsa"), draw_tokens(1, LENGTH)
    sparse = hf_logits(model, tokens)
    assert relative_error(hf_logits(build_hf_model("glm_moe_dsa", **DENSE), tokens), sparse) > 1e-2


PARTS = (
    "q_a_layernorm", "kv_b_proj", "layers.4.self_attn.indexer.wq_b", "layers.1.self_attn.indexer.k_norm.bias",
    "indexer.weights_proj", "layers.1.mlp.up_proj", "mlp.experts.gate_up_proj", "mlp.gate.weight",
    "mlp.gate.e_score_correction_bias", "shared_experts.down_proj",
)  # fmt: skip


def test_logits_see_every_part(groups, tmp_path):
    """The comparison is not blind: one weight rolled by a row fails it."""
    model, tokens = build_hf_model("glm_moe_dsa"), draw_tokens(1, 30)
    _, conventional = convert(model, tmp_path / "hf", groups)
    found = whole_sequence_logits(conventional, tokens)[..., :VOCABULARY]
    state, errors = model.state_dict(), {}
    for part in PARTS:
        changed = [tensor for name, tensor in state.items() if part in name]
        before = [tensor.clone() for tensor in changed]
        for tensor in changed:
            tensor.copy_(tensor.roll(1, -1 if tensor.dim() == 1 else -2))
        errors[part] = relative_error(found, hf_logits(model, tokens)) if changed else 0.0
        for tensor, values in zip(changed, before):
            tensor.copy_(values)
    assert min(errors.values()) > 1e-3, errors
    assert relative_error(found, hf_logits(model, tokens)) <= 1e-5


FIELDS = {
    "latent_norm_epsilon": 1e-5, "dsa_indexer_k_norm_epsilon": 1e-5, "dsa_indexer_rope_interleaved": False,
    "dsa_indexer_topk": 6, "moe_router_topk": 3, "moe_router_topk_scaling_factor": 1.0, "rotary_base": 10_000,
}  # fmt: skip


def test_logits_see_every_field(groups, tmp_path):
    """A field of the preset that config.json does not say, or says otherwise, gives other logits."""
    model, tokens = build_hf_model("glm_moe_dsa"), draw_tokens(1, 30)
    _, conventional = convert(model, tmp_path / "hf", groups)
    with HFReader(tmp_path / "hf") as reader:
        preset = preset_from_hf_config(reader.config)
    expected, errors = hf_logits(model, tokens), {}
    for field, value in FIELDS.items():
        other = build_conventional(dataclasses.replace(preset, **{field: value}), groups)
        share_weights(conventional, other)
        errors[field] = relative_error(whole_sequence_logits(other, tokens)[..., :VOCABULARY], expected)
    assert min(errors.values()) > 1e-4, errors
