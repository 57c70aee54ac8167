"""HF -> Megatron -> HF keeps names, shapes and bits; Megatron checkpoints at any padding and dtype."""

import dataclasses
import json

import pytest
import torch
from conversion_models import (
    ALL_CONFIGS,
    VOCABULARY,
    build_hf_model,
    draw_tokens,
    hf_logits,
    read_all,
    same_bits,
)

from megatron.grpo.conversion.architecture import preset_from_hf_config
from megatron.grpo.conversion.build import build_blank_model
from megatron.grpo.checkpoint_folders import TRACKER
from megatron.grpo.conversion.checkpoint_folder import find_iteration
from megatron.grpo.conversion.hf_reader import HFReader
from megatron.grpo.conversion.megatron_checkpoint import load_model_weights, save_model_weights
from megatron.grpo.conversion.weights import export_weights, hf_tensors, import_weights
from megatron.grpo.presets import get_preset, read_preset
from tools.convert_checkpoint import convert, parse_arguments


def save_mixed(family, folder, dtype=torch.bfloat16, **changes):
    """An HF folder of a random model: decay rates, norms and routers in float32 as published, the rest in `dtype`."""
    model = build_hf_model(family, **changes)
    for name, parameter in model.named_parameters():
        if not name.endswith(("A_log", "norm.weight", "gate.weight")):
            parameter.data = parameter.data.to(dtype)
    model.save_pretrained(folder, max_shard_size="60KB")
    for name in ("tokenizer.json", "chat_template.jinja"):
        (folder / name).write_text(name)
    return model


def run_tool(*arguments):
    assert convert(parse_arguments([str(argument) for argument in arguments])) == 0


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ALL_CONFIGS)
def test_the_tool_keeps_names_shapes_and_bits(family, tied, groups, tmp_path, capsys):
    source, checkpoint, back = (tmp_path / name for name in ("hf", "megatron", "back"))
    save_mixed(family, source, tie_word_embeddings=tied)
    run_tool("--hf-to-megatron", "--load", source, "--save", checkpoint)
    run_tool("--megatron-to-hf", "--load", checkpoint, "--save", back, "--max-shard-size", "1MB")
    before, after = read_all(source), read_all(back)
    assert before.keys() == after.keys()
    assert ("lm_head.weight" in after) is not tied
    assert [name for name in before if not same_bits(before[name], after[name])] == []
    assert {str(tensor.dtype) for tensor in after.values()} == {"torch.bfloat16", "torch.float32"}
    assert (back / "chat_template.jinja").read_text() == "chat_template.jinja"
    config = json.loads((back / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"], config["dtype"]) == (VOCABULARY, 2, "bfloat16")
    assert json.loads((back / "generation_config.json").read_text())["eos_token_id"] == 2
    assert f"wrote {len(before)} tensors" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["qwen3_5_text", "glm_moe_dsa"])
def test_transformers_loads_an_export_and_computes_the_same(family, groups, tmp_path):
    from transformers import AutoModelForCausalLM

    source, back = tmp_path / "hf", tmp_path / "back"
    model, tokens = build_hf_model(family), draw_tokens(1, 30)
    model.save_pretrained(source)
    with HFReader(source) as reader:
        preset = preset_from_hf_config(reader.config)
        converted = build_blank_model(preset, groups, dtype=torch.float32)
        import_weights(converted, reader, preset)
        export_weights(converted, preset, back, source_config=reader.config, max_shard_bytes=50_000)
    assert len(list(back.glob("*.safetensors"))) > 2
    loaded = AutoModelForCausalLM.from_pretrained(back).eval()
    assert torch.equal(hf_logits(loaded, tokens), hf_logits(model, tokens))


def test_a_checkpoint_loads_at_other_padding_and_dtype(groups, tmp_path):
    model = save_mixed("qwen3", tmp_path / "hf", dtype=torch.float32)
    with HFReader(tmp_path / "hf") as reader:
        preset = preset_from_hf_config(reader.config)
        converted = build_blank_model(preset, groups, dtype=torch.float32)
        import_weights(converted, reader, preset)
    for weight in (converted.output_layer.weight, converted.embedding.word_embeddings.weight):
        assert not weight[VOCABULARY:].any()
        weight.data[VOCABULARY:] = 1.0  # as training may leave them
    save_model_weights(tmp_path / "megatron", converted, preset)
    for divisible_by, dtype in ((128, torch.bfloat16), (7, torch.float32), (300, torch.float32)):
        other = build_blank_model(preset, groups, dtype=dtype, vocab_divisible_by=divisible_by)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.fill_(torch.nan)
        load_model_weights(tmp_path / "megatron", other)
        assert other.output_layer.weight.shape[0] == -(-VOCABULARY // divisible_by) * divisible_by
        assert not other.output_layer.weight[VOCABULARY:].any()
        assert not other.embedding.word_embeddings.weight[VOCABULARY:].any()
        expected = dict(model.named_parameters())
        for name, tensor in hf_tensors(other, preset):
            assert same_bits(tensor, expected[name].data.to(dtype)), (name, divisible_by)


def test_casting_is_asked_for(groups, tmp_path):
    save_mixed("llama", tmp_path / "hf")
    run_tool("--hf-to-megatron", "--load", tmp_path / "hf", "--save", tmp_path / "megatron", "--dtype", "float32")
    run_tool("--megatron-to-hf", "--load", tmp_path / "megatron", "--save", tmp_path / "wide")
    run_tool("--megatron-to-hf", "--load", tmp_path / "megatron", "--save", tmp_path / "narrow", "--dtype", "bf16")
    before, wide, narrow = (read_all(tmp_path / name) for name in ("hf", "wide", "narrow"))
    for name, tensor in before.items():
        assert same_bits(wide[name], tensor.float())
        assert same_bits(narrow[name], tensor.bfloat16())


def test_biases_of_experts_are_float32_whatever_the_dtype(groups, tmp_path):
    model = build_hf_model("deepseek_v32").bfloat16()
    model.save_pretrained(tmp_path)
    with HFReader(tmp_path) as reader:
        preset = preset_from_hf_config(reader.config)
        converted = build_blank_model(preset, groups, dtype=torch.bfloat16)
        import_weights(converted, reader, preset, dtype=torch.bfloat16)
    biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}
    found = dict(hf_tensors(converted, preset))
    assert len(biases) == 1 and all(same_bits(found[name], bias.float()) for name, bias in biases.items())


def test_check_writes_nothing(groups, tmp_path, capsys):
    save_mixed("llama", tmp_path / "hf")
    run_tool("--hf-to-megatron", "--load", tmp_path / "hf", "--check", "--json", "-")
    assert "checked 38 tensors" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_checkpoint_of_another_model_is_refused(groups, tmp_path):
    save_mixed("llama", tmp_path / "hf", dtype=torch.float32)
    run_tool("--hf-to-megatron", "--load", tmp_path / "hf", "--save", tmp_path / "megatron")
    preset = read_preset(tmp_path / "megatron")
    assert get_preset(str(tmp_path / "megatron")) == preset  # --model-preset takes the folder
    wider = build_blank_model(dataclasses.replace(preset, ffn_hidden_size=96), groups, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"linear_fc1.weight \[4, 160, 48\] instead of \[4, 192, 48\]"):
        load_model_weights(tmp_path / "megatron", wider)
    untied = build_blank_model(dataclasses.replace(preset, tied_embeddings=False), groups, dtype=torch.float32)
    with pytest.raises(ValueError, match="lacks output_layer.weight and has nothing beyond it"):
        load_model_weights(tmp_path / "megatron", untied)
    normed = build_blank_model(dataclasses.replace(preset, qk_layernorm=True), groups, dtype=torch.float32)
    with pytest.raises(ValueError, match="k_layernorm.weight, .*q_layernorm.weight"):
        load_model_weights(tmp_path / "megatron", normed)
    deeper = build_blank_model(dataclasses.replace(preset, num_layers=5), groups, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"input_layernorm.weight \[4, 48\] instead of \[5, 48\]"):
        load_model_weights(tmp_path / "megatron", deeper)
    larger = build_blank_model(dataclasses.replace(preset, vocab_size=200), groups, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"word_embeddings.weight \[128, 48\] instead of \[256, 48\]"):
        load_model_weights(tmp_path / "megatron", larger, dataclasses.replace(preset, vocab_size=200))


def test_a_tensor_parallel_size_that_does_not_divide_is_refused_before_anything_is_written(tmp_path):
    save_mixed("qwen3", tmp_path / "hf")
    with pytest.raises(ValueError, match="--tensor-model-parallel-size 4 does not divide the 2 key/value heads of hf"):
        run_tool(
            "--hf-to-megatron", "--load", tmp_path / "hf", "--save", tmp_path / "megatron",
            "--tensor-model-parallel-size", 4,
        )  # fmt: skip
    assert not (tmp_path / "megatron").exists()


def test_a_half_written_checkpoint_is_none(groups, tmp_path):
    save_mixed("llama", tmp_path / "hf")
    run_tool("--hf-to-megatron", "--load", tmp_path / "hf", "--save", tmp_path / "megatron")
    with pytest.raises(ValueError, match="nothing is overwritten"):
        run_tool("--hf-to-megatron", "--load", tmp_path / "hf", "--save", tmp_path / "megatron")
    assert find_iteration(tmp_path / "megatron").name == "release"
    (tmp_path / "megatron" / TRACKER).write_text("7")
    with pytest.raises(ValueError, match="iter_0000007, which is missing or incomplete"):
        find_iteration(tmp_path / "megatron")
    (tmp_path / "megatron" / TRACKER).write_text("soon")
    with pytest.raises(ValueError, match="holds 'soon', not the number of a step"):
        find_iteration(tmp_path / "megatron")
    (tmp_path / "megatron" / TRACKER).unlink()
    with pytest.raises(ValueError, match=f"it has no {TRACKER}"):
        run_tool("--megatron-to-hf", "--load", tmp_path / "megatron", "--save", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_layers_of_different_dtypes_need_a_choice(groups, tmp_path):
    source = tmp_path / "hf"
    model = build_hf_model("llama")
    model.model.layers[2].input_layernorm.bfloat16()
    model.save_pretrained(source)
    with HFReader(source) as reader:
        preset = preset_from_hf_config(reader.config)
        converted = build_blank_model(preset, groups, dtype=torch.float32)
        import_weights(converted, reader, preset)
        with pytest.raises(ValueError, match="different dtypes of decoder.layers.input_layernorm.weight"):
            save_model_weights(tmp_path / "refused", converted, preset)
        assert not (tmp_path / "refused").exists()
        import_weights(converted, reader, preset, dtype=torch.float32)
    save_model_weights(tmp_path / "chosen", converted, preset)


