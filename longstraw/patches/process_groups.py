"""Process groups of a run, handed down as Megatron's ProcessGroupCollection; no module looks up a global group."""

import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from longstraw.patches.device import cuda_available, cuda_means_cpu, install_cpu_device_layer


def initialize_groups(*, tensor_parallel: int = 1, context_parallel: int = 1) -> ProcessGroupCollection:
    """Join the world that torchrun describes and cut it into groups; what is left over is data parallel.

    Raises ValueError, naming the flags, when the sizes do not divide the world. Safe to call once per process.
    """
    install_cpu_device_layer()
    if not dist.is_initialized():
        if cuda_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        dist.init_process_group("nccl" if cuda_available() else "gloo")
    world = dist.get_world_size()
    if world % (tensor_parallel * context_parallel):
        raise ValueError(
            f"--tensor-model-parallel-size {tensor_parallel} x --context-parallel-size {context_parallel} "
            f"does not divide the {world} ranks"
        )
    with cuda_means_cpu():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor_parallel, context_parallel_size=context_parallel,
            create_gloo_process_groups=False,  # second groups for host tensors: threads that nothing here would use
        )
    return ProcessGroupCollection.use_mpu_process_groups()


def single_rank_groups(groups: ProcessGroupCollection) -> ProcessGroupCollection:
    """Groups in which this rank is alone for tensor and context parallelism (collective: every rank calls it)."""
    alone = ProcessGroupCollection.use_mpu_process_groups()
    own = None
    for rank in range(dist.get_world_size()):
        group = dist.new_group([rank])
        own = group if rank == dist.get_rank() else own
    alone.tp = alone.cp = alone.dp = alone.dp_cp = own
    return alone


def seed_model_parallel(seed: int) -> None:
    """Seed Megatron's own generators, from which weights are drawn; tensor-parallel ranks get different ones."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    with cuda_means_cpu():
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
