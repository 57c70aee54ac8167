"""Model presets: the architecture of each supported model as one frozen record.

`model_preset`: the record and the two languages that it speaks. `qwen`, `llama`, `glm`: the models of each family.
`checks`: which parallel sizes a model can be cut into. `sizes`: which of its own sizes contradict each other.

Left out: parallel sizes, precision and training settings, which are the launch's, not the model's.
"""

import json
from pathlib import Path

from megatron.grpo.presets.checks import check_divisible
from megatron.grpo.presets.glm import GLM_PRESETS
from megatron.grpo.presets.llama import LLAMA_PRESETS
from megatron.grpo.presets.model_preset import ModelPreset
from megatron.grpo.presets.qwen import QWEN_PRESETS

__all__ = ["PRESETS", "PRESET_FILE", "ModelPreset", "check_divisible", "get_preset", "read_preset"]

PRESETS: dict[str, ModelPreset] = {
    preset.name: preset for preset in (*QWEN_PRESETS, *LLAMA_PRESETS, *GLM_PRESETS)
}


PRESET_FILE = "longstraw_model.json"
"""The architecture, beside the weights of a converted checkpoint and of a training run's."""


def get_preset(name: str) -> ModelPreset:
    """The preset of that name, or of a checkpoint's folder (its longstraw_model.json).

    Raises ValueError that lists the known names, or says what is wrong with the file.
    """
    if name in PRESETS:
        return PRESETS[name]
    if (Path(name) / PRESET_FILE).is_file():
        return read_preset(name)
    raise ValueError(
        f"--model-preset {name} is not known; known are {', '.join(PRESETS)}, and the folder of a converted checkpoint, "
        f"which holds {PRESET_FILE}"
    )


def read_preset(folder: str | Path) -> ModelPreset:
    """The architecture of a checkpoint. Raises ValueError where it is missing or has unknown fields."""
    path = Path(folder) / PRESET_FILE
    if not path.is_file():
        raise ValueError(f"--load {folder} does not say its architecture: it has no {PRESET_FILE}")
    try:
        return ModelPreset(**json.loads(path.read_text()))
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a model description ({error})") from error
