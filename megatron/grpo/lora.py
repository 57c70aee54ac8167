"""LoRA in the training program: where its pairs start, and what a checkpoint says of them.

`longstraw.patches.lora` has the pairs themselves. A starts with normal numbers of variance 1 / k, drawn by the matrix's
name in the whole model, so that they do not depend on any parallel size; B starts at zero.

A checkpoint with pairs is one of the whole model, frozen weights included: it is gone on with, and exported merged,
without the one that the run began from. One without pairs fits a model with pairs, whose B are zero then.
"""

from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.process_groups_config import ProcessGroupCollection

from longstraw.patches.lora import add_pairs, find_pairs
from megatron.grpo.random_states import derive_seed
from megatron.grpo.sharding import whole_name


@torch.no_grad()
def start_pairs(model: torch.nn.Module, rank: int, alpha: float, seed: int, groups: ProcessGroupCollection) -> None:
    """Freeze the model and give its projection matrices pairs, drawn from the seed. Raises as `add_pairs`."""
    for pair in add_pairs(model, rank, alpha):
        matrix, tp = pair.matrix, pair.matrix.module.tp_group
        name = whole_name(matrix.name, model.config.num_moe_experts, groups.ep.rank(), groups.ep.size())
        generator = torch.Generator().manual_seed(derive_seed(seed, "lora_a", name))
        columns = matrix.module.input_size
        whole = torch.randn(rank, columns, generator=generator) * columns**-0.5
        pair.a.copy_(whole.chunk(tp.size(), 1)[tp.rank()] if matrix.split == "columns" else whole)


def describe_pairs(model: torch.nn.Module) -> dict[str, float] | None:
    """What a checkpoint says of a model's pairs: rank and alpha; None where it has none."""
    pairs = find_pairs(model)
    return {"rank": pairs[0].a.shape[0], "alpha": pairs[0].alpha} if pairs else None


def open_stored_pairs(path: str | Path, model: torch.nn.Module) -> None:
    """Give a model pairs, of zeros, as the checkpoint in folder `path` has them, if it has any."""
    stored = dist_checkpointing.load_common_state_dict(str(path)).get("content", {}).get("lora")
    if stored:
        add_pairs(model, stored["rank"], stored["alpha"])


def compare_pairs(path: str | Path, stored: dict | None, own: dict | None, *, resumes: bool) -> str | None:
    """One sentence where a checkpoint's pairs are not the model's, None where they fit.

    stored, own: of the checkpoint and the model, as `describe_pairs` gives them. resumes: whether the optimizer's state
    is wanted too; for weights alone, a checkpoint without pairs will do.
    """
    if stored == own or (stored is None and not resumes):
        return None
    if stored is None:
        return (
            f"the checkpoint {path} was trained without --lora-rank, so its optimizer state does not fit: give it as "
            "--pretrained-checkpoint, or pass --no-load-optim or --finetune"
        )
    given = f"--lora-rank {own['rank']} --lora-alpha {own['alpha']:g}" if own else "--lora-rank 0"
    return (
        f"the checkpoint {path} has low-rank pairs of --lora-rank {stored['rank']} --lora-alpha {stored['alpha']:g}, "
        f"not {given}: give the same, or merge them into weights with tools/convert_checkpoint.py --megatron-to-hf"
    )
