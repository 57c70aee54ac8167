"""The benchmark's model as transformers has it: the weights of LongStraw's runs, through the project's own conversion.

    export_model(model, "tiny-llama", folder)     # a Megatron model of the preset -> Hugging Face files
    load_model(folder)                            # in any process

Left out: padding of the vocabulary, which the benchmark's presets have none of.
"""

from pathlib import Path

import torch

from megatron.grpo.conversion.weights import export_weights
from megatron.grpo.presets import get_preset


def export_model(model, preset_name: str, folder: Path) -> Path:
    """Write the weights of a Megatron model of a preset as a Hugging Face folder; returns the folder.

    Raises ValueError where transformers has no such architecture, or the folder is not empty.
    """
    export_weights(model, get_preset(preset_name), folder)
    return folder


def has_only_attention(preset_name: str) -> bool:
    """Whether every layer of a preset is plain attention: PrefixGrouper has a hook for it and none for other layers."""
    preset = get_preset(preset_name)
    return preset.linear_attention_freq is None and preset.q_lora_rank is None


def load_model(folder: str | Path, *, checkpointed: bool = False):
    """The model in training mode, attention by torch's fused kernel.

    checkpointed: recompute every layer in the backward, as `GRPOConfig(gradient_checkpointing=True)` does.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation="sdpa", local_files_only=True)
    model.config.use_cache = False
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def compute_response_logprobs(model, hidden: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [G, R] of responses [G, R] from the hidden states [G, R, H] that predict them."""
    logits = model.lm_head(hidden).float()
    return logits.log_softmax(-1).gather(-1, responses[..., None])[..., 0]
