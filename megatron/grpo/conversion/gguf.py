"""A GGUF file as a Hugging Face folder: weights dequantised by transformers, tokenizer and chat template beside them.

transformers' own reader does both parts, so that the folder is what `from_pretrained(..., gguf_file=...)` gives.
Dequantised weights are float32.

Left out: writing GGUF.
"""

from pathlib import Path

from megatron.grpo.conversion.architecture import preset_from_hf_config
from megatron.grpo.conversion.hf_writer import make_empty_folder
from megatron.grpo.presets import ModelPreset


def convert_gguf(file: str | Path, folder: str | Path, *, dtype: str = "float32") -> ModelPreset:
    """Write a GGUF file's model, tokenizer and chat template as a Hugging Face folder; returns its preset.

    folder: empty or not there yet. dtype: of the weights, "float32" (what dequantisation gives) or "bfloat16".
    Raises ValueError where the file is missing, holds no chat model of a supported family, or the folder is not empty.
    """
    file = Path(file)
    if not file.is_file():
        raise ValueError(f"--from-gguf {file}: no such file")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = dict(pretrained_model_name_or_path=file.parent, gguf_file=file.name)
    config = AutoConfig.from_pretrained(**source).to_dict()
    config.pop("quantization_config", None)  # of the file; the folder's weights are dense
    preset = preset_from_hf_config(config, name=file.stem)
    folder = make_empty_folder(folder)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=getattr(torch, dtype), quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    return preset
