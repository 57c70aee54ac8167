"""Model presets: the architecture of each supported model as one frozen record.

`model_preset`: the record and the two languages that it speaks. `qwen`, `llama`, `glm`: the models of each family.
`checks`: which parallel sizes a model can be cut into.

Left out: parallel sizes, precision and training settings, which are the launch's, not the model's.
"""

from megatron.grpo.presets.checks import check_divisible
from megatron.grpo.presets.glm import GLM_PRESETS
from megatron.grpo.presets.llama import LLAMA_PRESETS
from megatron.grpo.presets.model_preset import ModelPreset
from megatron.grpo.presets.qwen import QWEN_PRESETS

__all__ = ["PRESETS", "ModelPreset", "check_divisible", "get_preset"]

PRESETS: dict[str, ModelPreset] = {
    preset.name: preset for preset in (*QWEN_PRESETS, *LLAMA_PRESETS, *GLM_PRESETS)
}


def get_preset(name: str) -> ModelPreset:
    """The preset of that name. Raises ValueError that lists the known ones."""
    if name not in PRESETS:
        raise ValueError(f"--model-preset {name} is not known; known are {', '.join(PRESETS)}")
    return PRESETS[name]
