"""A model's weights as Megatron's distributed checkpoint, with the architecture beside it.

`checkpoint_folder` says what the folder looks like; `--load DIR` of the training program starts from one.

Left out: optimizer, schedule and random states, which are `megatron.grpo.checkpointing`'s.
"""

from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory, apply_factories
from megatron.core.models.gpt import GPTModel

from longstraw.patches.checkpoint_writer import results_in_process
from longstraw.patches.device import cuda_means_cpu
from megatron.grpo.checkpoint_folders import RELEASE, commit_partial, open_partial, read_tracker
from megatron.grpo.conversion.checkpoint_folder import find_iteration, write_preset
from megatron.grpo.conversion.hf_reader import list_names
from megatron.grpo.presets import ModelPreset, read_preset


def save_model_weights(folder: str | Path, model: GPTModel, preset: ModelPreset) -> Path:
    """Write a model's weights under `folder` as its `release` checkpoint, each tensor in its own dtype; returns its path.

    A training run that loads a release checkpoint takes its weights and starts at step 0.
    Collective over all ranks; the tracker file is written last. Raises ValueError where the folder holds a checkpoint.
    """
    folder = Path(folder)
    if read_tracker(folder) is not None:
        raise ValueError(f"--save {folder} holds a checkpoint already; nothing is overwritten")
    weights = sharded_weights(model)
    _check_one_dtype_per_key(weights)
    dist.barrier()  # every rank has looked before the first writes
    opened = [str(open_partial(folder, RELEASE)) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(opened, src=0)
    state = {"checkpoint_version": 3.0, "iteration": 0, "vocab_size": preset.vocab_size, "model": weights}
    with cuda_means_cpu(), results_in_process():
        dist_checkpointing.save(state, opened[0], async_strategy="mcore")
    dist.barrier()
    if dist.get_rank() == 0:
        write_preset(folder, preset)
        commit_partial(Path(opened[0]), folder, RELEASE)
    dist.barrier()
    return folder / RELEASE


@torch.no_grad()
def load_model_weights(
    folder: str | Path, model: GPTModel, preset: ModelPreset | None = None, *, step: int | None = None
) -> None:
    """Fill a model, at its own TP and EP size, vocabulary padding and dtypes, with the weights of a checkpoint.

    folder: as `save_model_weights` or a training run writes it, weights only; step: of which iteration, the latest by
    default. Padding of the vocabulary is set to zero. preset: the model's, where the folder does not say it.
    Collective over all ranks.
    Raises ValueError where there is no checkpoint, or its model has other parameters or shapes.
    """
    path, state = find_iteration(folder, step), sharded_weights(model)
    preset = preset or read_preset(folder)
    stored = _check_keys(path, state)
    apply_factories(state)
    targets = {key: value for key, value in _walk(state) if isinstance(value, ShardedTensor)}
    _check_shapes(path, stored, targets.values(), preset.vocab_size)
    tensors = chain(model.parameters(), model.buffers())
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    if any(value.data.untyped_storage().data_ptr() not in storages for value in targets.values()):
        raise RuntimeError("megatron-core's sharded state dict no longer shares its storage with the parameters")
    parts = {key: value.data for key, value in targets.items()}
    with cuda_means_cpu():
        loaded = dict(_walk(dist_checkpointing.load(state, str(path))))
    for key, part in parts.items():
        if loaded[key].data_ptr() != part.data_ptr():
            part.copy_(loaded[key])
    clear_vocabulary_padding(model, preset.vocab_size)


def sharded_weights(model: GPTModel) -> dict:
    """The model's sharded state dict, as Megatron's training saves it under "model"."""
    metadata = {"dp_cp_group": model.pg_collection.dp_cp}
    state = model.sharded_state_dict(metadata=metadata)
    return {key: value for key, value in state.items() if isinstance(value, (ShardedTensor, ShardedTensorFactory))}


def adopt_checkpoint_dtypes(folder: str | Path, model: GPTModel, *, step: int | None = None) -> None:
    """Give every parameter of a blank model the dtype that it has in a checkpoint."""
    path, state = find_iteration(folder, step), sharded_weights(model)
    stored = _check_keys(path, state)
    for name, parameter in model.named_parameters():
        parameter.data = torch.empty_like(parameter, dtype=stored[_parts_of(state[name].key, stored)[0]].dtype)


@torch.no_grad()
def clear_vocabulary_padding(model: GPTModel, vocab_size: int) -> None:
    """Set this TP rank's rows of embedding and output layer beyond the vocabulary to zero."""
    for name, parameter in model.named_parameters():
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            start = model.pg_collection.tp.rank() * parameter.shape[0]
            parameter[max(vocab_size - start, 0) :].zero_()


def _check_keys(path: Path, state: dict) -> dict:
    """What the checkpoint stores by key; raises ValueError unless its weights are those of the model, by name."""
    stored = dist_checkpointing.load_tensors_metadata(str(path))
    weights = {key for key in stored if key.startswith(("embedding.", "decoder.", "output_layer."))}
    wanted = {value.key for value in state.values()}
    missing = sorted(key for key in wanted if not _parts_of(key, weights))
    extra = sorted(weights.difference(*(_parts_of(key, weights) for key in wanted)))
    if missing or extra:
        raise ValueError(
            f"{path} is a checkpoint of another model: it lacks {list_names(missing) or 'nothing'} and has "
            f"{list_names(extra) or 'nothing'} beyond it"
        )
    return stored


def _check_shapes(path: Path, stored: dict, targets, vocab_size: int) -> None:
    """Raise ValueError that lists the weights of another shape; padding of the vocabulary may differ."""
    wrong = set()
    for target in targets:
        found, wanted = stored[target.key].global_shape, target.global_shape
        if target.allow_shape_mismatch:  # rows are token ids
            fits = found[1:] == wanted[1:] and min(found[0], wanted[0]) >= vocab_size
        else:
            fits = found == wanted
        if not fits:
            wrong.add(f"{target.key} {list(found)} instead of {list(wanted)}")
    if wrong:
        raise ValueError(f"{path} is a checkpoint of another model, with {list_names(sorted(wrong))}")


def _parts_of(key: str, stored) -> list[str]:
    """The stored keys of one parameter: its own, or one for each of its sections (in_proj.weight.query, ...)."""
    return [key] if key in stored else [name for name in stored if name.startswith(f"{key}.")]


def _check_one_dtype_per_key(weights: dict) -> None:
    """Layers that are alike share a key, and so a dtype, in a distributed checkpoint."""
    dtypes: dict[str, set] = {}
    for value in weights.values():
        dtypes.setdefault(value.key, set()).add(value.data.dtype)
    mixed = sorted(key for key, found in dtypes.items() if len(found) > 1)
    if mixed:
        raise ValueError(f"layers hold different dtypes of {list_names(mixed)}; choose one with --dtype")


def _walk(tree, prefix: str = ""):
    """(path, leaf) of nested dicts and lists."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else None
    if items is None:
        yield prefix, tree
        return
    for key, value in items:
        yield from _walk(value, f"{prefix}/{key}")
