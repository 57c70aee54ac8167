"""Gradient finalization, once a step: Megatron's own, plus the sums over tensor parallelism that it leaves out.

Megatron's `finalize_model_grads` sums DDP's buckets over data x context parallelism, and adds over TP the norms that see
only part of the tokens (sequence parallelism) or of the heads (q and k norm). It misses the gated delta net's output
norm, which sees only this rank's heads (distributed/finalize_model_grads.py, `_allreduce_non_tensor_model_parallel_grads`),
and knows nothing of parameters of ours, which say so themselves (`partial_over_tp`, of low-rank pairs).

The whole step runs under DDP's `no_sync`, so that a bucket is reduced once, whatever the number of chunks.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection

from longstraw.adapters.base import LayerAdapter
from longstraw.patches.device import cuda_means_cpu


def wrap_for_gradients(
    model: torch.nn.Module, groups: ProcessGroupCollection, *, reduce_in_fp32: bool = False
) -> DistributedDataParallel:
    """Megatron's DDP around a model, for programs without its command line: `main_grad` buffers, summed once.

    reduce_in_fp32: accumulate and reduce in float32 also where the weights are narrower.
    """
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=reduce_in_fp32, overlap_grad_reduce=False)
    with cuda_means_cpu():
        return DistributedDataParallel(model.config, config, model, pg_collection=groups)


def finalize_gradients(ddp_model, adapters: Sequence[LayerAdapter], groups: ProcessGroupCollection) -> None:
    """Reduce every gradient to its global sum, in `main_grad`. Called by all ranks, once a step, after `no_sync`.

    ddp_model: Megatron's DistributedDataParallel, built with `calculate_per_token_loss` (sums, no averages).
    """
    own = [parameter for parameter in ddp_model.parameters() if getattr(parameter, "partial_over_tp", False)]
    sum_over_tp(adapters, groups.tp, own)
    with cuda_means_cpu():
        finalize_model_grads([ddp_model], None, pg_collection=groups)


def sum_over_tp(
    adapters: Sequence[LayerAdapter], tp: dist.ProcessGroup, others: Sequence[torch.nn.Parameter] = ()
) -> None:
    """Add over TP the gradients that the adapters name as partial sums, and those of other such parameters."""
    if tp.size() == 1:
        return
    partial = [*(p for adapter in adapters for p in adapter.partial_over_tp()), *others]
    grads = [p.main_grad for p in partial if p.requires_grad]
    if not grads:
        return
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    dist.all_reduce(flat, group=tp)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads])):
        grad.copy_(total.view_as(grad))
