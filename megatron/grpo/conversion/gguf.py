"""A GGUF file as a Hugging Face folder: weights dequantised by transformers, tokenizer and chat template beside them.

transformers' own reader does both parts, so that the folder is what `from_pretrained(..., gguf_file=...)` gives. It
needs the package accelerate. It parses the file anew for each part, word by word of the vocabulary; `read_once` spares
most of that. Dequantised weights are float32.

Left out: writing GGUF.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy

from megatron.grpo.conversion.architecture import preset_from_hf_config
from megatron.grpo.conversion.hf_writer import make_empty_folder, require_empty_folder
from megatron.grpo.presets import ModelPreset


class _PlainReader(gguf.GGUFReader):
    """A reader whose arrays are plain views of the mapped file: slicing a `numpy.memmap` takes several times as long."""

    def _get(self, *args, **kwargs):
        if isinstance(self.data, numpy.memmap):
            self.data = self.data.view(numpy.ndarray)
        return super()._get(*args, **kwargs)


@contextmanager
def read_once() -> Iterator[None]:
    """A block in which transformers parses a GGUF file once, however often it opens it, and on plain arrays."""
    original, gguf.GGUFReader = gguf.GGUFReader, functools.cache(_PlainReader)
    try:
        yield
    finally:
        gguf.GGUFReader = original


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
    with read_once():
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype=getattr(torch, dtype), quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(**source)
    # GGUF keeps numbers in float32 (1e-5 as 9.999999747378752e-06): the shortest decimal of the same float32 is meant.
    model.config.rms_norm_eps = float(str(numpy.float32(model.config.rms_norm_eps)))
    preset = preset_from_hf_config(model.config.to_dict(), name=file.stem)
    make_empty_folder(folder, "--to-hf")
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return preset
