"""A model to convert with: the preset's parameters on the CPU, without random weights, and the groups it needs.

Left out: everything that runs; `megatron.grpo.model_provider` builds the models that compute.
"""

import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from longstraw.patches.process_groups import initialize_groups
from megatron.grpo.model_provider import build_model, pad_vocab_size
from megatron.grpo.presets import ModelPreset


def start_groups(*, tensor_parallel: int = 1, expert_parallel: int = 1) -> ProcessGroupCollection:
    """Groups over gloo, which conversion uses on every machine since its tensors are on the CPU.

    A process that torchrun started joins its job; any other is a world of its own and opens no port. Where groups exist
    already, those are it. Raises ValueError, naming the flag, where they are of another size.
    """
    if parallel_state.model_parallel_is_initialized():
        groups = ProcessGroupCollection.use_mpu_process_groups()
        for kind, group, size in (("tensor", groups.tp, tensor_parallel), ("expert", groups.ep, expert_parallel)):
            if group.size() != size:
                raise ValueError(f"--{kind}-model-parallel-size {size}: this process has groups of {group.size()}")
        return groups
    if not dist.is_initialized():
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
        else:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups = initialize_groups(tensor_parallel=tensor_parallel, expert_parallel=expert_parallel)
    model_parallel_cuda_manual_seed(1)  # Megatron's constructors fork its random state, which has to exist
    return groups


def build_blank_model(
    preset: ModelPreset, groups: ProcessGroupCollection, *, dtype: torch.dtype, vocab_divisible_by: int = 128
) -> GPTModel:
    """This TP and EP rank's part of the preset's model, its weights not set; the vocabulary padded as Megatron pads it.

    Memory that is never written is never taken, so a blank model costs nothing until it is filled.
    Raises ValueError, naming the flag, where TP does not divide the heads or EP the experts.
    """
    config = preset.transformer_config(
        tensor_model_parallel_size=groups.tp.size(), expert_model_parallel_size=groups.ep.size(), params_dtype=dtype,
        perform_initialization=False, use_cpu_initialization=True,
    )  # fmt: skip
    padded = pad_vocab_size(preset.vocab_size, vocab_divisible_by, groups.tp.size())
    return build_model(preset, config, groups, padded_vocab_size=padded).cpu()


def leave_groups() -> None:
    """Undo `start_groups`, so that the process ends quietly."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
