"""Save and load a run through Megatron's dist_checkpointing, under the names that Megatron's users know.

    save_checkpoint(args, step, model, optimizer, scheduler, groups, data_position=order.state_dict())
    resumed = load_checkpoint(args, model, optimizer, scheduler, groups)     # None: nothing to load, start afresh

A checkpoint holds weights, Adam's state, schedules, random states, the data's position and the caller's own values. At
the same parallel sizes a run goes on bit for bit; at others the weights, moments, schedule and data position are the
same and the random states start anew. It is saved synchronously, in this process; `megatron.grpo.checkpoint_folders`
says what a kill in the middle leaves.

Megatron's own save_checkpoint is not used: it names the latest checkpoint by a plain write, overwrites what a killed
save left, starts a helper process, knows no data position, and its loader changes the weights before it finds a
mismatch. Left out: legacy formats, asynchronous saves, converting between optimizers or precisions.
"""

import json
import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.process_groups_config import ProcessGroupCollection

from longstraw.durable_files import write_whole
from longstraw.patches.checkpoint_writer import results_in_process
from longstraw.patches.device import cuda_means_cpu
from longstraw.patches.lora import is_pair, silence_pairs
from megatron.grpo.arguments import resolve_preset
from megatron.grpo.checkpoint_check import compare_shapes, model_shapes, stored_shapes
from megatron.grpo.checkpoint_folders import (
    RELEASE, checkpoint_folder, commit_partial, drop_previous, find_checkpoint, open_partial, read_tracker,
)
from megatron.grpo.conversion.megatron_checkpoint import sharded_weights
from megatron.grpo.lora import compare_pairs, describe_pairs
from megatron.grpo.optimizer import fit_loaded_state
from megatron.grpo.presets import PRESET_FILE
from megatron.grpo.random_states import collect_random_states, restore_random_states
from megatron.grpo.schedule_check import compare_schedules

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class ResumedRun:
    """What was loaded, beside what the model, the optimizer and the schedules now hold."""

    path: Path
    """The checkpoint's folder."""

    iteration: int
    """Steps that were taken before it was saved; 0 where only its weights were wanted."""

    data_position: dict | None = None
    """`PromptOrder.state_dict()` at that step; None where only its weights were wanted."""

    extra: dict[str, Any] = field(default_factory=dict)
    """The caller's own values, as they were saved."""

    random_states: bool = False
    """Whether the random states are those of that step. At other parallel sizes they start from --seed."""


def save_checkpoint(
    args: Namespace, iteration: int, model: torch.nn.Module, optimizer, scheduler, groups: ProcessGroupCollection, *,
    data_position: dict | None = None, extra: dict[str, Any] | None = None,
    generators: Mapping[str, torch.Generator] | None = None,
) -> Path:
    """Save the run after `iteration` steps to --save, and make that the latest checkpoint. Collective; synchronous.

    model: the model inside DDP. data_position and extra: plain values, equal on every rank. generators: this rank's own
    random generators, by name, saved with the global ones.
    Returns the checkpoint's folder.
    """
    metadata = _metadata(args.use_distributed_optimizer, groups)
    with cuda_means_cpu():
        weights = sharded_weights(model)
        state: dict[str, Any] = {"model": weights}
        if not args.no_save_optim:
            state["optimizer"] = optimizer.sharded_state_dict(weights, metadata=metadata)
            state["opt_param_scheduler"] = scheduler.state_dict()
        if not args.no_save_rng:
            state["random_states"] = _own_object("random_states", collect_random_states(generators or {}))
        state |= {
            "iteration": iteration,
            "data_position": data_position,
            "extra": extra or {},
            "arguments": _plain_arguments(args),
            "vocab_size": args.vocab_size,
            "content": _describe(args, groups) | {"lora": describe_pairs(model)},
        }
        previous = _write(state, args.save, iteration, groups, parallel=args.ckpt_fully_parallel_save)
    if dist.get_rank() == 0:
        _keep_architecture(args)
        if args.save_retain_interval:
            drop_previous(args.save, previous, iteration, args.save_retain_interval)
    return checkpoint_folder(args.save, iteration)


def _keep_architecture(args: Namespace) -> None:
    """Write the architecture beside the checkpoints, so that they can be exported without their flags."""
    path, text = Path(args.save) / PRESET_FILE, json.dumps(asdict(resolve_preset(args)), indent=2) + "\n"
    if not path.is_file() or path.read_text() != text:
        write_whole(path, text)


def save_weights(
    folder: str | Path, model: torch.nn.Module, groups: ProcessGroupCollection, *, vocab_size: int,
    extra: dict[str, Any] | None = None,
) -> Path:
    """Save weights without a training state, as Megatron's `release` checkpoint. Collective.

    For converted models and warm starts: --pretrained-checkpoint and --load start from it at step 0.
    """
    with cuda_means_cpu():
        state = {
            "model": sharded_weights(model),
            "iteration": 0, "extra": extra or {}, "vocab_size": vocab_size,
            "content": {
                "format": _FORMAT, "optimizer": False, "random_states": None, "lora": describe_pairs(model),
            },
        }
        _write(state, folder, RELEASE, groups, parallel=True)
    return Path(folder) / RELEASE


def _write(state: dict, folder, iteration: int | str, groups: ProcessGroupCollection, *, parallel: bool):
    """Write a state dict as the latest checkpoint; returns what was the latest before (rank 0, None elsewhere)."""
    rank, opened = dist.get_rank(), [None, None]
    if rank == 0:
        try:
            opened = [read_tracker(folder), str(open_partial(folder, iteration))]
        except (OSError, ValueError) as error:
            opened = [error, None]
    dist.broadcast_object_list(opened, src=0)
    previous, partial = opened
    if partial is None:
        raise ValueError(f"the checkpoint cannot be saved to {folder}: {previous}")
    strategy = TorchDistSaveShardedStrategy()
    if parallel:
        strategy = FullyParallelSaveStrategyWrapper(strategy, groups.dp_cp)
    with results_in_process():
        dist_checkpointing.save(state, partial, strategy, async_strategy="mcore")
    dist.barrier()
    if rank == 0:
        commit_partial(Path(partial), folder, iteration)
    dist.barrier()
    return previous


def load_checkpoint(
    args: Namespace, model: torch.nn.Module, optimizer, scheduler, groups: ProcessGroupCollection, *,
    generators: Mapping[str, torch.Generator] | None = None,
) -> ResumedRun | None:
    """Load what --load, --pretrained-checkpoint and their companions ask for. Collective.

    --load goes on with the latest checkpoint (or --ckpt-step's); where it has none, --pretrained-checkpoint gives the
    weights, and without that the run starts afresh: None is returned, unless --exit-on-missing-checkpoint. --finetune,
    like a release checkpoint, takes the weights alone and starts at step 0; --no-load-optim leaves Adam and the
    schedules as they are, --no-load-rng the random states.

    Raises ValueError, on every rank and with nothing changed, when the checkpoint is missing, of another model, or
    without something that is asked of it.
    """
    found = _on_rank_0(lambda: _choose(args))
    if found is None:
        return None
    path, iteration, weights_only = found
    want_optimizer = not weights_only and not args.no_load_optim
    common, want_random = _inspect(
        path, args.vocab_size, model, want_optimizer=want_optimizer,
        want_random=not weights_only and not args.no_load_rng, optimizer_flags=_optimizer_flags(args),
        topology=_topology(groups),
    )
    keep_schedule = args.use_checkpoint_opt_param_scheduler
    if want_optimizer and not (keep_schedule or args.override_opt_param_scheduler):
        difference = compare_schedules(path, common["opt_param_scheduler"], scheduler.state_dict())
        if difference:
            raise ValueError(difference)
    metadata = _metadata(args.use_distributed_optimizer, groups)
    with cuda_means_cpu():
        weights = _weights_in(common, model)
        wanted: dict[str, Any] = {"model": weights}
        if want_optimizer:
            wanted["optimizer"] = optimizer.sharded_state_dict(weights, is_loading=True, metadata=metadata)
        if want_random:
            wanted["random_states"] = _own_object("random_states", None)
        loaded = dist_checkpointing.load(wanted, str(path))
        _fill(model, loaded["model"])
        if want_optimizer:
            state = fit_loaded_state(optimizer, loaded["optimizer"], keep_rates=keep_schedule)
            optimizer.load_state_dict(state)
            saved = common["opt_param_scheduler"]
            schedule = saved if keep_schedule else scheduler.state_dict() | {"num_steps": saved["num_steps"]}
            scheduler.num_steps = 0  # load_state_dict adds the saved steps to those taken
            scheduler.load_state_dict(schedule)
        elif optimizer is not None:
            optimizer.reload_model_params()
    if want_random:
        restore_random_states(loaded["random_states"], generators or {})
    dist.barrier()
    if weights_only:
        return ResumedRun(path=path, iteration=0, extra=common.get("extra", {}))
    return ResumedRun(
        path=path, iteration=iteration, data_position=common.get("data_position"), extra=common.get("extra", {}),
        random_states=want_random,
    )


def load_weights(
    folder: str | Path, model: torch.nn.Module, groups: ProcessGroupCollection, *, vocab_size: int
) -> Path:
    """Load the weights of a folder's latest checkpoint, whatever else it holds. Collective. Returns its path.

    Raises ValueError, on every rank and with nothing changed, when there is none or it is of another model.
    """

    def choose():
        found = find_checkpoint(folder)
        if found is None:
            raise ValueError(f"{folder} holds no checkpoint")
        return found[0]

    path = _on_rank_0(choose)
    common, _ = _inspect(path, vocab_size, model, want_optimizer=False, want_random=False)
    with cuda_means_cpu():
        _fill(model, dist_checkpointing.load({"model": _weights_in(common, model)}, str(path))["model"])
    dist.barrier()
    return path


def read_data_position(folder: str | Path, iteration: int) -> dict:
    """Where the data stood when the checkpoint of a step was saved; no model is needed.

    Raises ValueError when the checkpoint is missing or cannot be read, or says nothing of the data.
    """
    path, _ = find_checkpoint(folder, iteration)
    try:
        position = dist_checkpointing.load_common_state_dict(str(path)).get("data_position")
    except Exception as error:  # any failure to read it is one
        raise ValueError(f"the checkpoint {path} cannot be read: {type(error).__name__}: {error}") from error
    if position is None:
        raise ValueError(f"the checkpoint {path} does not say where the data stood")
    return position


def _weights_in(common: dict, model: torch.nn.Module) -> dict:
    """The model's sharded weights, those that a checkpoint with these common values has: it may lack low-rank pairs."""
    weights = sharded_weights(model)
    if common.get("content", {}).get("lora"):
        return weights
    return {name: weight for name, weight in weights.items() if not is_pair(name)}


def _fill(model: torch.nn.Module, weights: dict) -> None:
    """Put loaded weights into the model. Modules may have state of their own beside them (fp8 scales), which is empty.

    Low-rank pairs that they lack add nothing then, whatever they held.
    """
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if not any(map(is_pair, weights)):
        silence_pairs(model)
        missing = [name for name in missing if not is_pair(name)]
    missing = [name for name in missing if not name.endswith("_extra_state")]
    if missing or unexpected:
        raise RuntimeError(f"the loaded weights lack {missing} and have {unexpected} beyond the model's")


def refuse_foreign_checkpoints(args: Namespace) -> None:
    """Raise ValueError, on every rank, where --save holds checkpoints that this run does not go on from. Collective.

    A run that starts afresh there would overwrite some of them and leave others, which a later --load would take up.
    """

    def look():
        if not args.save or (args.load and os.path.realpath(args.load) == os.path.realpath(args.save)):
            return
        found = find_checkpoint(args.save)
        if found is not None:
            raise ValueError(
                f"--save {args.save} holds a checkpoint of step {found[1]} already: give --load {args.save} to go on from "
                "it, or another folder"
            )

    _on_rank_0(look)


def find_reference(args: Namespace, reference_checkpoint: str | None, resumed: ResumedRun | None) -> str | None:
    """The folder of the reference policy's weights; None: those that the model holds now.

    reference_checkpoint: --reference-checkpoint. resumed: what `load_checkpoint` gave.
    Raises ValueError when the run goes on from a checkpoint that is not where it started, and nothing says where.
    """
    if reference_checkpoint:
        return reference_checkpoint
    if resumed is None or resumed.iteration == 0:
        return None
    if args.pretrained_checkpoint:
        return args.pretrained_checkpoint
    raise ValueError(
        f"--kl-coefficient needs the weights that the run started from, and it goes on from step {resumed.iteration}: "
        "give them by --reference-checkpoint or --pretrained-checkpoint"
    )


def _choose(args: Namespace) -> tuple[Path, int, bool] | None:
    """(path, step, whether only the weights are wanted) of the checkpoint to load."""
    found = find_checkpoint(args.load, args.ckpt_step) if args.load else None
    if found is not None:
        path, iteration = found
        return path, 0 if iteration == RELEASE else iteration, args.finetune or iteration == RELEASE
    if args.pretrained_checkpoint:
        found = find_checkpoint(args.pretrained_checkpoint)
        if found is None:
            raise ValueError(f"--pretrained-checkpoint {args.pretrained_checkpoint} holds no checkpoint")
        return found[0], 0, True
    if args.load and args.exit_on_missing_checkpoint:
        raise ValueError(f"--load {args.load} holds no checkpoint, and --exit-on-missing-checkpoint is given")
    return None


def _inspect(
    path: Path, vocab_size: int, model, *, want_optimizer: bool, want_random: bool,
    optimizer_flags: dict | None = None, topology: dict | None = None,
) -> tuple[dict, bool]:
    """The checkpoint's common values, and whether its random states are this rank's. Collective; changes nothing.

    Raises ValueError, on every rank, in one sentence.
    """
    common, problem = {}, None
    try:
        common = dist_checkpointing.load_common_state_dict(str(path))
        with cuda_means_cpu():
            wanted = model_shapes(_weights_in(common, model))
        pairs = common.get("content", {}).get("lora"), describe_pairs(model)
        problem = compare_pairs(path, *pairs, resumes=want_optimizer) or compare_shapes(
            path, stored_shapes(path), wanted
        ) or _compare_content(
            path, common, vocab_size, want_optimizer=want_optimizer, want_random=want_random,
            optimizer_flags=optimizer_flags or {},
        )
    except Exception as error:  # any failure to read it is one: it must end all ranks alike, not leave some waiting
        problem = f"the checkpoint {path} cannot be read: {type(error).__name__}: {error}"
    problems = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for problem in problems:
        if problem:
            raise ValueError(problem)
    return common, want_random and common["content"]["random_states"] == topology


def _compare_content(
    path: Path, common: dict, vocab_size: int, *, want_optimizer: bool, want_random: bool, optimizer_flags: dict
) -> str | None:
    """One sentence when the checkpoint lacks something, or was made for another vocabulary or precision."""
    content = common.get("content", {})
    if common.get("vocab_size", vocab_size) != vocab_size:
        return f"the checkpoint {path} has --vocab-size {common['vocab_size']}, not {vocab_size}"
    if want_optimizer and not content.get("optimizer"):
        return f"the checkpoint {path} has no optimizer state: pass --no-load-optim or --finetune"
    for flag, given in optimizer_flags.items() if want_optimizer else ():
        found = content["optimizer"].get(flag, "adam" if flag == "--optimizer" else None)
        if isinstance(given, str) or isinstance(found, str):
            if found != given:
                return (
                    f"the checkpoint {path} was saved {_with_value(flag, found)} and this run is {_with_value(flag, given)}, "
                    "so its optimizer state does not fit: pass --no-load-optim or --finetune"
                )
        elif bool(found) != bool(given):
            was, now = ("without", "with") if given else ("with", "without")
            return (
                f"the checkpoint {path} was saved {was} {flag} and this run is {now} it, so its optimizer state does "
                "not fit: pass --no-load-optim or --finetune"
            )
    if want_random and not content.get("random_states"):
        return f"the checkpoint {path} has no random states: pass --no-load-rng"
    return None


def _with_value(flag: str, value: str | None) -> str:
    return f"without {flag}" if value is None else f"with {flag} {value}"


def _on_rank_0(function):
    """What `function` gives on rank 0, on every rank; its ValueError or OSError becomes every rank's ValueError."""
    result = [None, None]
    if dist.get_rank() == 0:
        try:
            result = [function(), None]
        except (ValueError, OSError) as error:
            result = [None, str(error)]
    dist.broadcast_object_list(result, src=0)
    if result[1] is not None:
        raise ValueError(result[1])
    return result[0]


def _own_object(key: str, value) -> ShardedObject:
    """A value of this rank alone, as the checkpoint stores it."""
    return ShardedObject(key, value, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)


def _metadata(distributed_optimizer: bool, groups: ProcessGroupCollection) -> dict:
    """How Megatron's optimizers lay out their sharded state."""
    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True, "dp_cp_group": groups.dp_cp}
    if distributed_optimizer:
        metadata |= {
            "distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False
        }
    return metadata


def _topology(groups: ProcessGroupCollection) -> dict[str, int]:
    """The sizes that decide which rank holds which random state (expert parallelism does not)."""
    return {"ranks": dist.get_world_size(), "tp": groups.tp.size(), "cp": groups.cp.size(), "dp": groups.dp.size()}


def _describe(args: Namespace, groups: ProcessGroupCollection) -> dict:
    """What the checkpoint holds, so that a missing part is named before loading starts."""
    return {
        "format": _FORMAT,
        "optimizer": None if args.no_save_optim else _optimizer_flags(args),
        "random_states": None if args.no_save_rng else _topology(groups),
    }


def _optimizer_flags(args: Namespace) -> dict[str, bool | str]:
    """Flags that decide what the optimizer's state consists of: flag -> whether it is given, or its value."""
    flags: dict[str, bool | str] = {
        "--bf16": args.bf16, "--use-distributed-optimizer": args.use_distributed_optimizer, "--optimizer": args.optimizer,
    }
    if args.optimizer == "logra":
        flags |= {
            "--update-direction": args.update_direction, "--update-rule": args.update_rule,
            "--logra-train-rest": args.logra_train_rest,
        }
        if args.update_direction == "sketch":
            flags |= {"--logra-rank": str(args.logra_rank)}
            if args.logra_refresh == 0:  # one draw for the whole run
                flags |= {"--logra-seed": str(args.logra_seed), "--logra-projection": args.logra_projection}
    return flags


def _plain_arguments(args: Namespace) -> dict:
    """The arguments in force, for the record; those that differ between ranks are left out."""
    plain = (bool, int, float, str, type(None))
    return {
        name: value if isinstance(value, plain) else str(value)
        for name, value in vars(args).items()
        if name not in ("rank", "local_rank")
    }
