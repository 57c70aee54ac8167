"""Reading and writing Hugging Face folders, and the account that every tensor is held to."""

import dataclasses
import json

import pytest
import torch
from conversion_models import write_folder
from safetensors.torch import save_file

from megatron.grpo.conversion.accounting import find_prefix
from megatron.grpo.conversion.architecture import hf_config_from_preset
from megatron.grpo.conversion.hf_reader import INDEX, HFReader
from megatron.grpo.conversion.hf_writer import copy_tokenizer, make_empty_folder, plan_shards, write_shards
from megatron.grpo.conversion.names import map_parameters
from megatron.grpo.conversion.plan import plan_import, verify_layouts
from megatron.grpo.presets import PRESETS

TIED = dataclasses.replace(PRESETS["tiny-llama"], num_layers=1)
HYBRID = dataclasses.replace(PRESETS["tiny-qwen3.6"], linear_attention_freq=2, num_layers=2)
GLM = dataclasses.replace(
    PRESETS["tiny-glm5.2"], num_layers=4, moe_layer_freq=(0, 1, 1, 1), num_experts=5, dsa_indexer_topk_freq=2,
    dsa_indexer_skip_topk_offset=2,
)  # fmt: skip


def tensors_of(preset, dtype=torch.bfloat16, **options):
    generator = torch.Generator().manual_seed(1)
    sources = [source for entry in map_parameters(preset, **options) for source in entry.sources]
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in sources}


def plan(tmp_path, preset, tensors, changes=(), **options):
    config = hf_config_from_preset(preset, dtype="bfloat16") | dict(changes)
    folder = write_folder(tmp_path / "hf", config, tensors)
    with HFReader(folder) as reader:
        maps, report = plan_import(reader, preset, **options)
        verify_layouts(reader, maps, **options)
        return report


@pytest.mark.parametrize("preset", [TIED, HYBRID, GLM], ids=["llama", "qwen3.5", "glm"])
def test_a_whole_checkpoint_is_taken(tmp_path, preset):
    tensors = tensors_of(preset)
    report = plan(tmp_path, preset, tensors)
    assert (report.tensors, report.left_out) == (len(tensors), {})
    assert report.elements == sum(tensor.numel() for tensor in tensors.values())
    assert report.dtypes == {"BF16": len(tensors)}


def test_every_wrong_name_and_shape_is_listed(tmp_path):
    tensors = tensors_of(TIED)
    tensors["model.layers.0.mlp.extra_proj.weight"] = torch.zeros(2)
    tensors["model.layers.1.input_layernorm.weight"] = torch.zeros(2)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(3, 128)
    with pytest.raises(ValueError) as refusal:
        plan(tmp_path, TIED, tensors)
    text = str(refusal.value)
    assert "2 unmapped: model.layers.0.mlp.extra_proj.weight, model.layers.1.input_layernorm.weight" in text
    assert "1 missing: model.norm.weight" in text
    assert "1 of another shape: model.layers.0.self_attn.k_proj.weight [3, 128] instead of [64, 128]" in text


def test_what_is_left_out_on_purpose_is_listed(tmp_path):
    tensors = tensors_of(HYBRID, prefix="model.language_model.")
    assert find_prefix(tensors) == "model.language_model."
    for name in ("model.visual.blocks.0.attn.qkv.weight", "mtp.layers.0.mlp.up_proj.weight", "mtp.fc.weight"):
        tensors[name] = torch.zeros(2, 2)
    report = plan(tmp_path, HYBRID, tensors)
    assert {reason: found["tensors"] for reason, found in report.left_out.items()} == {
        "vision tower": 1, "next-token-prediction layers": 2
    }  # fmt: skip
    assert report.left_out["vision tower"]["names"] == ["model.visual.blocks.0.attn.qkv.weight"]


def test_next_token_layers_are_left_out_where_the_config_declares_them(tmp_path):
    tensors = tensors_of(GLM)
    ahead = {f"model.layers.4.{name}.weight": torch.zeros(2, 2) for name in ("eh_proj", "mlp.experts.0.up_proj")}
    report = plan(tmp_path / "one", GLM, tensors | ahead, {"num_nextn_predict_layers": 1})
    assert (report.tensors, set(report.left_out["next-token-prediction layers"]["names"])) == (len(tensors), set(ahead))
    with pytest.raises(ValueError, match="2 unmapped: model.layers.4.eh_proj.weight, model.layers.4.mlp.experts.0"):
        plan(tmp_path / "none", GLM, tensors | ahead)
    with pytest.raises(ValueError, match="1 unmapped: model.layers.5.eh_proj.weight"):
        further = {"model.layers.5.eh_proj.weight": torch.zeros(2, 2)}
        plan(tmp_path / "further", GLM, tensors | further, {"num_nextn_predict_layers": 1})


def test_indexers_are_where_layers_select_and_nowhere_else(tmp_path):
    tensors = tensors_of(GLM)
    assert sorted(name[:14] for name in tensors if name.endswith("indexer.wk.weight")) == [
        "model.layers.0", "model.layers.1", "model.layers.3"
    ]  # fmt: skip
    name = "model.layers.2.self_attn.indexer.wk.weight"
    with pytest.raises(ValueError, match=f"1 unmapped: {name}"):
        plan(tmp_path / "shared", GLM, tensors | {name: torch.zeros(16, 64)})
    del tensors["model.layers.3.self_attn.indexer.k_norm.bias"]
    with pytest.raises(ValueError, match="1 missing: model.layers.3.self_attn.indexer.k_norm.bias"):
        plan(tmp_path / "full", GLM, tensors)


def test_every_expert_and_bias_must_be_there(tmp_path):
    tensors = tensors_of(GLM)
    for name in ("experts.4.down_proj.weight", "gate.e_score_correction_bias"):
        del tensors[f"model.layers.3.mlp.{name}"]
    tensors["model.layers.1.mlp.experts.5.up_proj.weight"] = torch.zeros(32, 64)
    with pytest.raises(ValueError) as refusal:
        plan(tmp_path, GLM, tensors)
    text = str(refusal.value)
    assert "1 unmapped: model.layers.1.mlp.experts.5.up_proj.weight" in text
    assert "2 missing: model.layers.3.mlp.experts.4.down_proj.weight, model.layers.3.mlp.gate.e_score" in text


def test_fused_experts_are_refused(tmp_path):
    tensors = tensors_of(GLM) | {"model.layers.1.mlp.experts.gate_up_proj": torch.zeros(5, 64, 64)}
    with pytest.raises(ValueError, match="its experts are fused, where transformers' save_pretrained writes them one"):
        plan(tmp_path, GLM, tensors)


def test_experts_of_a_layer_have_one_dtype(tmp_path):
    tensors = tensors_of(GLM)
    name = "model.layers.3.mlp.experts.3.down_proj.weight"
    tensors[name] = tensors[name].float()
    with pytest.raises(ValueError, match=r"make up decoder.layers.3.mlp.experts.local_experts.\*.linear_fc2.weight"):
        plan(tmp_path / "refused", GLM, tensors)
    assert plan(tmp_path / "chosen", GLM, tensors, dtype=torch.bfloat16).dtypes["F32"] == 1


def test_a_vision_tower_in_a_text_family_is_unmapped(tmp_path):
    with pytest.raises(ValueError, match="1 unmapped: mtp.fc.weight"):
        plan(tmp_path, TIED, tensors_of(TIED) | {"mtp.fc.weight": torch.zeros(2, 2)})


def test_a_tied_head_must_be_the_embeddings(tmp_path):
    tensors = tensors_of(TIED)
    head = tensors["model.embed_tokens.weight"].clone()
    assert plan(tmp_path / "same", TIED, tensors | {"lm_head.weight": head}).left_out
    with pytest.raises(ValueError, match="lm_head.weight differs from model.embed_tokens.weight"):
        plan(tmp_path / "other", TIED, tensors | {"lm_head.weight": head + 1})


def test_an_untied_head_must_be_there(tmp_path):
    tensors = tensors_of(HYBRID)
    del tensors["lm_head.weight"]
    with pytest.raises(ValueError, match="1 missing: lm_head.weight"):
        plan(tmp_path, HYBRID, tensors)


def test_mixed_dtypes_within_a_parameter_need_a_choice(tmp_path):
    tensors = tensors_of(TIED)
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].float()
    with pytest.raises(ValueError, match="decoder.layers.0.mlp.linear_fc1.weight; choose one with --dtype"):
        plan(tmp_path / "refused", TIED, tensors)
    assert plan(tmp_path / "chosen", TIED, tensors, dtype=torch.bfloat16).dtypes == {"BF16": len(tensors) - 1, "F32": 1}


def test_integer_weights_are_refused(tmp_path):
    tensors = tensors_of(TIED) | {"model.norm.weight": torch.zeros(128, dtype=torch.int8)}
    with pytest.raises(ValueError, match=r"1 not floating point: model.norm.weight \(I8\)"):
        plan(tmp_path, TIED, tensors)


def test_a_pickle_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pytorch_model.bin and no safetensors; only safetensors are read"):
        HFReader(tmp_path)


def test_the_tool_says_in_one_sentence_why_not(tmp_path, monkeypatch, capsys):
    from tools.convert_checkpoint import main

    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    torch.save({}, tmp_path / "pytorch_model.bin")
    arguments = ["--hf-to-megatron", "--load", str(tmp_path), "--save", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["convert_checkpoint.py", *arguments])
    assert main() == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith("convert_checkpoint: ") and "only safetensors are read" in said[0]
    assert not (tmp_path / "out").exists()


def test_folders_that_are_no_checkpoint_are_refused(tmp_path):
    with pytest.raises(ValueError, match="has no config.json"):
        HFReader(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no safetensors"):
        HFReader(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 40)
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        HFReader(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="model.safetensors, other.safetensors and no model.safetensors.index.json"):
        HFReader(tmp_path)


def test_an_index_must_agree_with_its_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "x.safetensors")

    def open_with(weight_map):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        with HFReader(tmp_path) as reader:
            return sorted(reader.headers)

    assert open_with({"a": "x.safetensors", "b": "x.safetensors"}) == ["a", "b"]
    with pytest.raises(ValueError, match="disagree on b"):
        open_with({"a": "x.safetensors"})
    with pytest.raises(ValueError, match="disagree on c"):
        open_with({"a": "x.safetensors", "b": "x.safetensors", "c": "x.safetensors"})
    with pytest.raises(ValueError, match="not a file in that folder"):
        open_with({"a": "../x.safetensors"})


def test_shards_keep_to_the_limit_and_the_order(tmp_path):
    sizes = {"a": 40, "b": 40, "c": 100, "d": 8}
    files = plan_shards(sizes, 88)
    assert files == {
        "a": "model-00001-of-00003.safetensors", "b": "model-00001-of-00003.safetensors",
        "c": "model-00002-of-00003.safetensors", "d": "model-00003-of-00003.safetensors",
    }  # fmt: skip
    assert set(plan_shards(sizes, 1000).values()) == {"model.safetensors"}
    tensors = {name: torch.full((size // 4,), float(size)) for name, size in sizes.items()}
    (tmp_path / "config.json").write_text("{}")
    write_shards(tmp_path, iter(tensors.items()), files, 188)
    assert json.loads((tmp_path / INDEX).read_text())["metadata"] == {"total_size": 188}
    with HFReader(tmp_path) as reader:
        assert all(torch.equal(reader.read(name), tensor) for name, tensor in tensors.items())
        assert {name: header.file for name, header in reader.headers.items()} == files


def test_nothing_is_overwritten(tmp_path):
    assert make_empty_folder(tmp_path / "new").is_dir()
    (tmp_path / "new" / "file").write_text("")
    with pytest.raises(ValueError, match="not an empty folder; nothing is overwritten"):
        make_empty_folder(tmp_path / "new")


def test_tokenizer_files_and_templates_are_copied(tmp_path):
    source, target = tmp_path / "a", tmp_path / "b"
    (source / "additional_chat_templates").mkdir(parents=True)
    target.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool.jinja", "model.safetensors"):
        (source / name).write_text(name)
    assert copy_tokenizer(source, target) == ["tokenizer.json", "chat_template.jinja", "additional_chat_templates/"]
    assert (target / "additional_chat_templates/tool.jinja").read_text().endswith("tool.jinja")
    assert not (target / "model.safetensors").exists()
