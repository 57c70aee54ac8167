"""A checkpoint with low-rank pairs is exported merged: transformers computes from it what the adapted model computes."""

import json
from dataclasses import asdict

import pytest
import torch
from conversion_models import VOCABULARY, build_hf_model, chunked_logits, draw_tokens, hf_logits, read_all, relative_error

from longstraw.patches.lora import add_pairs, find_pairs
from megatron.grpo.checkpointing import save_weights
from megatron.grpo.conversion.architecture import preset_from_hf_config
from megatron.grpo.conversion.build import build_blank_model
from megatron.grpo.conversion.hf_reader import HFReader
from megatron.grpo.conversion.weights import import_weights
from megatron.grpo.presets import PRESET_FILE
from tools.convert_checkpoint import convert, parse_arguments


@pytest.mark.parametrize("family", ["qwen3_5_text", "glm_moe_dsa"])
def test_logits_of_merged_pairs(family, groups, tmp_path, capsys):
    build_hf_model(family).save_pretrained(tmp_path / "hf")
    with HFReader(tmp_path / "hf") as reader:
        preset = preset_from_hf_config(reader.config)
        model = build_blank_model(preset, groups, dtype=torch.float32)
        import_weights(model, reader, preset)
    tokens = draw_tokens(1, 40)
    before = chunked_logits(model, tokens, 19)[..., :VOCABULARY]
    add_pairs(model, 4, 8.0)
    generator = torch.Generator().manual_seed(1)
    for pair in find_pairs(model):
        for parameter in (pair.a, pair.b):
            parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    adapted = chunked_logits(model, tokens, 19)[..., :VOCABULARY]
    assert relative_error(adapted, before) > 1e-3
    save_weights(tmp_path / "megatron", model, groups, vocab_size=preset.vocab_size)
    (tmp_path / "megatron" / PRESET_FILE).write_text(json.dumps(asdict(preset)))

    arguments = ["--megatron-to-hf", "--load", str(tmp_path / "megatron"), "--save", str(tmp_path / "merged")]
    assert convert(parse_arguments(arguments)) == 0
    assert f"merged {len(find_pairs(model))} low-rank pairs into their weights" in capsys.readouterr().out
    assert read_all(tmp_path / "merged").keys() == read_all(tmp_path / "hf").keys()
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert relative_error(hf_logits(merged, tokens), adapted) <= 1e-5
