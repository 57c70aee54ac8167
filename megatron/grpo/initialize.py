"""Start a run on every rank, in the order that Megatron needs, and end it.

    args, config = parse_command_line()
    groups = initialize(args)
    ...
    shut_down()

Megatron's own `initialize_megatron` would build its process groups only on a GPU and compile an indexer for datasets
that this program does not read, so it is called for logging and its global state only; process groups and seeds come
first and from here.

Left out: the tokenizer, the data and the model.
"""

import contextlib
import fcntl
import io
import json
import logging
import os
import random
from argparse import Namespace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import destroy_rerun_state_machine
from megatron.training import get_wandb_writer
from megatron.training.global_vars import set_global_variables, unset_global_variables
from megatron.training.initialize import initialize_megatron

from longstraw.patches.device import cuda_available, cuda_means_cpu, install_cpu_device_layer
from longstraw.patches.gloo_device import share_gloo_device
from longstraw.patches.process_groups import initialize_groups
from megatron.grpo.quiet_logs import quiet_logs

_FOLDER_FLAGS = ("--output-dir, --save, --rollout-store", "--weight-sync-dir")
_held_folders: list[io.IOBase] = []


def initialize(args: Namespace) -> ProcessGroupCollection:
    """Join the job, claim the output folders, set Megatron's globals and the seeds. Collective.

    args: from `parse_arguments`. W&B's run
    (`megatron.training.get_wandb_writer`) is on the last rank, as in Megatron; TensorBoard is the recorder's on rank 0.
    Raises ValueError, on every rank, when another run holds one of these folders.
    """
    install_cpu_device_layer()
    share_gloo_device()
    join_world(args)
    claim_folders(list_outputs(args))
    groups = initialize_groups(
        tensor_parallel=args.tensor_model_parallel_size, context_parallel=args.context_parallel_size,
        expert_parallel=args.expert_model_parallel_size,
    )
    if args.logging_level is None:
        quiet_logs()
        logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)  # says at each start that it is there
    with contextlib.redirect_stdout(io.StringIO()):  # Megatron announces each of its globals
        # Without the folder Megatron opens no TensorBoard writer, whose events would be a second, empty run in it.
        folder, args.tensorboard_dir = args.tensorboard_dir, None
        set_global_variables(args, build_tokenizer=False)
        args.tensorboard_dir = folder
        initialize_megatron(allow_no_cuda=True, skip_mpu_initialization=True)
    seed_everything(args.seed)
    return groups


def join_world(args: Namespace) -> None:
    """torch.distributed over the ranks that torchrun describes; a lone process without torchrun is a world of one."""
    if dist.is_initialized():
        return
    if cuda_available():
        torch.cuda.set_device(args.local_rank)
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(args.distributed_backend, timeout=timeout)
    else:
        dist.init_process_group(args.distributed_backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def list_outputs(args: Namespace) -> list[str]:
    """The folders that a training run writes, which no other run may write at that time."""
    return [args.output_dir, *filter(None, (args.save, args.rollout_store, args.weight_sync_dir))]


def claim_folders(folders: list[str]) -> None:
    """Make the folders and hold them until this process ends, however it ends. Collective; rank 0 does it.

    Raises ValueError, on every rank, when another run holds one of them or it cannot be made.
    """
    problem = [None]
    if dist.get_rank() == 0:
        for folder in dict.fromkeys(os.path.realpath(folder) for folder in folders):
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
                lock = open(Path(folder) / ".lock", "w")
            except OSError as error:
                problem = [f"{folder} cannot be written: {error}; choose another {_FOLDER_FLAGS[0]} or {_FOLDER_FLAGS[1]}"]
                break
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                problem = [
                    f"another run is writing to {folder}: give this one its own {_FOLDER_FLAGS[0]} and {_FOLDER_FLAGS[1]}"
                ]
                break
            _held_folders.append(lock)
    dist.broadcast_object_list(problem, src=0)
    if problem[0]:
        release_folders()
        raise ValueError(problem[0])


def write_arguments(args: Namespace) -> None:
    """Leave `arguments.json` in the output folder: every argument in force, Megatron's and ours. Rank 0 writes; called once
    nothing of them can be refused any more, so that a refused run leaves an earlier one's."""
    if dist.get_rank() != 0:
        return
    text = json.dumps(vars(args), indent=1, sort_keys=True, default=str)
    (Path(args.output_dir) / "arguments.json").write_text(text + "\n")


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy, torch and Megatron's generators; tensor-parallel ranks differ only in Megatron's own."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    with cuda_means_cpu():
        tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def shut_down() -> None:
    """Close the writers, leave the process groups and give the folders back. For the regular end of a run."""
    wandb = get_wandb_writer()
    if wandb is not None:
        wandb.finish()
    unset_global_variables()
    destroy_rerun_state_machine()
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    release_folders()


def release_folders() -> None:
    """Give back what `claim_folders` holds."""
    while _held_folders:
        _held_folders.pop().close()
