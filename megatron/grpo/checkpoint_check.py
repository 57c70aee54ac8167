"""Whether a checkpoint fits the model, found out from its metadata before anything is loaded.

Left out: the optimizer's state, which has the parameters' shapes.
"""

from collections.abc import Mapping

Shapes = Mapping[str, tuple[int, ...]]


def model_shapes(sharded_state_dict) -> dict[str, tuple[int, ...]]:
    """Name -> shape of each parameter over all ranks, from a model's sharded state dict (which is used up).

    A parameter of several sections (gate and up, q and k and v) appears as the checkpoint stores it, by section.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    apply_factories(sharded_state_dict)
    return {
        tensor.key: tuple(tensor.global_shape)
        for tensor in nested_values(sharded_state_dict)
        if isinstance(tensor, ShardedTensor)
    }


def stored_shapes(path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of each parameter in the checkpoint at `path`; the optimizer's tensors are left out."""
    from megatron.core.dist_checkpointing import load_tensors_metadata

    return {
        key: tuple(tensor.global_shape)
        for key, tensor in load_tensors_metadata(str(path)).items()
        if not key.startswith("optimizer.")
    }


def compare_shapes(path, stored: Shapes, wanted: Shapes, *, most: int = 3) -> str | None:
    """One sentence that names the first parameters in which a checkpoint and the model differ; None where they agree.

    path: of the checkpoint, for the sentence. stored: what it holds. wanted: what the model has. most: how many
    parameters are named.
    """
    different = []
    for name in sorted({*stored, *wanted}, key=_natural):
        if name not in stored:
            different.append(f"{name} is missing there and {list(wanted[name])} here")
        elif name not in wanted:
            different.append(f"{name} is {list(stored[name])} there and missing here")
        elif stored[name] != wanted[name]:
            different.append(f"{name} is {list(stored[name])} there and {list(wanted[name])} here")
    if not different:
        return None
    more = f" and {len(different) - most} more differ" if len(different) > most else ""
    return (
        f"the checkpoint {path} is of another model than --model-preset and the model flags describe: "
        f"{'; '.join(different[:most])}{';' + more if more else ''}"
    )


def _natural(name: str) -> list:
    """Sorts layers by number: 2 before 10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split(".")]
