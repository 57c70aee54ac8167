"""Process groups of a run, handed down as Megatron's ProcessGroupCollection; no module looks up a global group."""

import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from longstraw.patches.device import cuda_available, cuda_means_cpu, install_cpu_device_layer
from longstraw.patches.gloo_device import share_gloo_device
from longstraw.patches.world_sizes import find_misfits


def initialize_groups(
    *, tensor_parallel: int = 1, context_parallel: int = 1, expert_parallel: int = 1
) -> ProcessGroupCollection:
    """Join the world that torchrun describes and cut it into groups; what is left over is data parallel.

    Dense parameters lie over tensor x context x data parallelism, experts over tensor x expert parallelism and their own
    data parallelism: expert-parallel ranks are neighbours, mostly context-parallel ranks of one prompt.
    Raises ValueError, naming the flags, when the sizes do not divide the world. Safe to call once per process.
    """
    install_cpu_device_layer()
    share_gloo_device()
    if not dist.is_initialized():
        if cuda_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        dist.init_process_group("nccl" if cuda_available() else "gloo")
    misfits = find_misfits(
        dist.get_world_size(), tensor_parallel=tensor_parallel, context_parallel=context_parallel,
        expert_parallel=expert_parallel,
    )
    if misfits:
        raise ValueError(misfits[0])
    with cuda_means_cpu():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor_parallel, context_parallel_size=context_parallel,
            expert_model_parallel_size=expert_parallel,
            create_gloo_process_groups=False,  # second groups for host tensors: threads that nothing here would use
        )
    return ProcessGroupCollection.use_mpu_process_groups()


def find_groups() -> ProcessGroupCollection | None:
    """The groups of this process, where they are made already."""
    return ProcessGroupCollection.use_mpu_process_groups() if parallel_state.model_parallel_is_initialized() else None


_SINGLE = (
    "tp", "cp", "tp_cp", "dp", "dp_cp", "tp_dp_cp", "ep", "expt_tp", "tp_ep", "tp_ep_pp", "expt_dp", "intra_dp_cp",
    "intra_expt_dp",
)


def single_rank_groups(groups: ProcessGroupCollection) -> ProcessGroupCollection:
    """Groups in which this rank is alone, for every kind of parallelism (collective: every rank calls it)."""
    alone = ProcessGroupCollection.use_mpu_process_groups()
    own = None
    for rank in range(dist.get_world_size()):
        group = dist.new_group([rank])
        own = group if rank == dist.get_rank() else own
    for name in _SINGLE:
        setattr(alone, name, own)
    return alone


def seed_model_parallel(seed: int) -> None:
    """Seed Megatron's own generators, from which weights are drawn; tensor-parallel ranks get different ones."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    with cuda_means_cpu():
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
