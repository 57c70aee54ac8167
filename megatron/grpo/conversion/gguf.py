"""A GGUF file as a Hugging Face folder: weights dequantised by transformers, tokenizer and chat template beside them.

transformers' own reader does both parts, so that the folder is what `from_pretrained(..., gguf_file=...)` gives. It
needs the package accelerate, and parses the file anew for each part: a minute of one core for a vocabulary of 49,152.
Dequantised weights are float32.

Left out: writing GGUF.
"""

from pathlib import Path

import numpy

from megatron.grpo.conversion.architecture import preset_from_hf_config
from megatron.grpo.conversion.hf_writer import make_empty_folder, require_empty_folder
from megatron.grpo.presets import ModelPreset


def convert_gguf(file: str | Path, folder: str | Path, *, dtype: str = "float32") -> ModelPreset:
    """Write a GGUF file's model, tokenizer and chat template as a Hugging Face folder; returns its preset.

    folder: empty or not there yet. dtype: of the weights, "float32" (what dequantisation gives) or "bfloat16".
    Raises ValueError where the file is missing, holds no chat model of a supported family, or the folder is not empty.
    """
    file = Path(file)
    if not file.is_file():
        raise ValueError(f"--from-gguf {file}: no such file")
    require_empty_folder(folder, "--to-hf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = dict(pretrained_model_name_or_path=file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=getattr(torch, dtype), quantization_config=GgufConfig(dequantize=True)
    )
    # GGUF keeps numbers in float32 (1e-5 as 9.999999747378752e-06): the shortest decimal of the same float32 is meant.
    model.config.rms_norm_eps = float(str(numpy.float32(model.config.rms_norm_eps)))
    preset = preset_from_hf_config(model.config.to_dict(), name=file.stem)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    make_empty_folder(folder, "--to-hf")
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return preset
