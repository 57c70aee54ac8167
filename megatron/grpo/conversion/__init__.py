"""Hugging Face <-> Megatron conversion, tensor by tensor: Llama, Qwen3, Qwen3.5/3.6 (text), GLM-5.x, DeepSeek-V3.2.

`architecture` turns a config.json into a ModelPreset and back, `latent_architecture` the part of it that latent attention
and experts have; `layouts` and `names` say how parameters correspond;
`hf_folder` reads and writes safetensors; `accounting` holds every tensor to account; `weights` moves weights between an
HF folder and a model; `megatron_checkpoint` stores a model's weights as Megatron's distributed checkpoint; `gguf`
dequantises a GGUF file into an HF folder. `tools/convert_checkpoint.py` is the command.

Left out: `.bin` checkpoints (pickles), quantised weights, experts without latent attention.
"""
