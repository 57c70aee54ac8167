"""Hugging Face <-> Megatron conversion, tensor by tensor, for Llama, Qwen3 and Qwen3.5/3.6 text models.

`architecture` turns a config.json into a ModelPreset and back; `layouts` and `names` say how parameters correspond;
`hf_folder` reads and writes safetensors; `accounting` holds every tensor to account; `weights` moves weights between an
HF folder and a model; `megatron_checkpoint` stores a model's weights as Megatron's distributed checkpoint; `gguf`
dequantises a GGUF file into an HF folder. `tools/convert_checkpoint.py` is the command.

Left out: `.bin` checkpoints (pickles), quantised weights, MoE and multi-latent attention.
"""
