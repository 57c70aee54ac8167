"""A converted model computes what transformers computes: whole sequences, and chunk by chunk through the engine."""

import pytest
import torch
from conversion_models import (
    CONFIGS,
    VOCABULARY,
    build_hf_model,
    build_multimodal_model,
    build_pair,
    chunked_logits,
    draw_tokens,
    hf_logits,
    relative_error,
    share_weights,
    whole_sequence_logits,
)

from longstraw.patches.float64 import lift_float64
from megatron.grpo.conversion.architecture import preset_from_hf_config
from megatron.grpo.conversion.hf_reader import HFReader
from megatron.grpo.conversion.weights import import_weights

CHUNKS = (19, 75)


def convert(model, folder, groups):
    """(stateful, conventional) Megatron models of an HF model saved in several shards, and the import's report."""
    model.save_pretrained(folder, max_shard_size="60KB")
    with HFReader(folder) as reader:
        assert len({header.file for header in reader.headers.values()}) > 1
        preset = preset_from_hf_config(reader.config)
        stateful, conventional = build_pair(preset, groups)
        report = import_weights(stateful, reader, preset)
    share_weights(stateful, conventional)
    return stateful, conventional, report


def check_logits(stateful, conventional, tokens, expected, tolerance):
    found = {"whole": whole_sequence_logits(conventional, tokens)}
    found |= {f"chunks of {chunk}": chunked_logits(stateful, tokens, chunk) for chunk in CHUNKS}
    errors = {way: relative_error(logits[..., :VOCABULARY], expected) for way, logits in found.items()}
    assert max(errors.values()) <= tolerance, errors
    for way, logits in found.items():
        assert logits.shape[-1] == 128, way
        assert not logits[..., VOCABULARY:].any(), f"padding of the vocabulary has logits, {way}"


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_equal_transformers(family, groups, tmp_path):
    model, tokens = build_hf_model(family), draw_tokens()
    stateful, conventional, _ = convert(model, tmp_path / "hf", groups)
    check_logits(stateful, conventional, tokens, hf_logits(model, tokens), 1e-5)
    with lift_float64():
        inverse_frequencies = model.model.rotary_emb.inv_freq.clone()
        model.double()
        # Both sides turn by float32 angles; `double` would change transformers' alone.
        model.model.rotary_emb.inv_freq = inverse_frequencies
        expected = hf_logits(model, tokens)
        check_logits(stateful.double(), conventional.double(), tokens, expected, 1e-12)


def test_the_text_half_of_a_multimodal_checkpoint(groups, tmp_path):
    model, tokens = build_multimodal_model(), draw_tokens()
    stateful, conventional, report = convert(model, tmp_path / "hf", groups)
    check_logits(stateful, conventional, tokens, hf_logits(model, tokens), 1e-5)
    vision = {name for name, _ in model.named_parameters() if name.startswith("model.visual.")}
    assert set(report.left_out["vision tower"]["names"]) == vision


@pytest.mark.parametrize("changed", ["self_attn.q_proj", "linear_attn.in_proj_z", "linear_attn.A_log", "mlp.up_proj"])
def test_logits_see_every_part(changed, groups, tmp_path):
    """The comparison is not blind: one weight rolled by a row fails it."""
    model, tokens = build_hf_model("qwen3_5_text", num_hidden_layers=4), draw_tokens(1, 20)
    _, conventional, _ = convert(model, tmp_path / "hf", groups)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if changed in name:
                parameter.copy_(parameter.roll(1, 0))
    expected = hf_logits(model, tokens)
    assert relative_error(whole_sequence_logits(conventional, tokens)[..., :VOCABULARY], expected) > 1e-3
