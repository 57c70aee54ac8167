"""Adam and its schedules through Megatron's optimizer, and one optimizer step that cannot move the weights by accident.

In a trainer, after `finalize_gradients`:

    if not gradients_are_finite(ddp, groups):      # roll back: nothing has moved yet
        names = name_nonfinite_gradients(ddp, groups)
    ok, grad_norm = step_optimizer(optimizer, scheduler)
    ddp.zero_grad_buffer()

Schedules count optimizer steps (Megatron's own loop counts samples). With --bf16 the optimizer keeps float32 weights of
its own. Runs on the CPU as on a GPU.

Left out: loss scaling, SGD and the emerging optimizers.
"""

import math
from argparse import Namespace
from dataclasses import fields

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection

from longstraw.patches.device import cuda_means_cpu
from megatron.grpo.sharding import whole_name


def build_optimizer(args: Namespace, ddp, groups: ProcessGroupCollection) -> MegatronOptimizer:
    """Adam over the parameters of a DDP-wrapped model, as Megatron's flags say.

    Weights of one dimension are not decayed (Megatron's rule). Adam's moments exist from the start, as zeros, so that a
    checkpoint has the same content before the first step as after it. Under expert parallelism it is a chain of two:
    dense parameters, and experts, whose copies lie on other ranks.
    """
    values = {field.name: getattr(args, field.name) for field in fields(OptimizerConfig) if hasattr(args, field.name)}
    values["optimizer"] = "adam"
    with cuda_means_cpu():
        chain = get_megatron_optimizer(
            OptimizerConfig(**values), [ddp], use_gloo_process_groups=False, pg_collection=groups
        )
    open_moments(chain)
    return chain if len(chain.chained_optimizers) > 1 else chain.chained_optimizers[0]


def parts_of(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers of a chain, or the one optimizer."""
    return optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def optimizer_state(optimizer: MegatronOptimizer) -> dict[torch.nn.Parameter, dict]:
    """Adam's state of every parameter of this rank, by the weight that Adam updates."""
    return {weight: held for part in parts_of(optimizer) for weight, held in part.optimizer.state.items()}


def open_moments(optimizer: MegatronOptimizer) -> None:
    """Make Adam's state before the first step: zero moments and a step count of 0.

    torch's Adam makes it in the first step; loading a checkpoint fills tensors that have to exist by then. Fused Adams
    keep their count in the parameter groups and make their own state.
    """
    for part in parts_of(optimizer):
        if not _counts_per_parameter(part.optimizer):
            continue
        for parameter in (p for group in part.optimizer.param_groups for p in group["params"]):
            part.optimizer.state[parameter] |= {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter.data),
                "exp_avg_sq": torch.zeros_like(parameter.data),
            }


_RATES = ("max_lr", "min_lr", "start_wd", "end_wd")
"""What the schedules read of a parameter group, and Megatron recognises a saved group by."""


def fit_loaded_state(optimizer: MegatronOptimizer, loaded: dict, *, keep_rates: bool = False) -> dict:
    """The optimizer's state from a checkpoint, as its `load_state_dict` wants it.

    keep_rates: the parameter groups take the checkpoint's rates; else the checkpoint's take the present ones.

    Adds the step count of 0, which Megatron leaves out when it saves. A checkpoint of one optimizer fits a chain and the
    other way round (expert parallelism or not): moments go by names, and the parameter groups are the present ones,
    whose rates the schedules set.
    """
    if hasattr(optimizer, "fit_loaded_state"):
        return optimizer.fit_loaded_state(loaded, keep_rates=keep_rates)
    parts = parts_of(optimizer)
    saved = _inner_state(loaded)
    saved = saved if _has_groups(saved) else _inner_state(loaded[0])
    step = saved["state"].get("common_step", torch.tensor(0.0))
    states = {number: loaded[number] for number in range(len(parts))} if len(parts) > 1 else {0: loaded}
    for part, state in zip(parts, states.values()):
        inner = _inner_state(state)
        if _counts_per_parameter(part.optimizer):
            inner["state"].setdefault("common_step", step.clone())
        if not _has_groups(inner):
            inner["param_groups"] = _inner_state(part.state_dict())["param_groups"]
        for own, saved_group in zip(part.optimizer.param_groups, inner["param_groups"]):
            source, target = (saved_group, own) if keep_rates else (own, saved_group)
            target.update({name: source[name] for name in _RATES if name in source})
    return states if len(parts) > 1 else {key: value for key, value in loaded.items() if not isinstance(key, int)}


def _inner_state(state: dict) -> dict:
    """The state of torch's optimizer, which a mixed-precision optimizer keeps in its own."""
    return state.get("optimizer", state)


def _has_groups(inner: dict) -> bool:
    """Whether the parameter groups come from the checkpoint: loading leaves empty ones where it has none."""
    return any("lr" in group for group in inner.get("param_groups", []))


def _counts_per_parameter(inner: torch.optim.Optimizer) -> bool:
    return isinstance(inner, (torch.optim.Adam, torch.optim.AdamW))


def build_scheduler(args: Namespace, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Learning rate and weight decay over optimizer steps: warmup, then --lr-decay-style until --lr-decay-iters.

    As in Megatron, the rate of the first step is the schedule's value at 0: --lr-warmup-init under a warmup.
    """
    decay_steps = args.lr_decay_iters or args.train_iters
    warmup = args.lr_warmup_iters if args.lr_warmup_fraction is None else args.lr_warmup_fraction * decay_steps
    return OptimizerParamScheduler(
        optimizer, init_lr=args.lr_warmup_init, max_lr=args.lr, min_lr=args.min_lr, lr_warmup_steps=warmup,
        lr_decay_steps=decay_steps, lr_decay_style=args.lr_decay_style, start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay, wd_incr_steps=args.train_iters, wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler, wsd_decay_steps=args.lr_wsd_decay_iters,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )


def gradients_are_finite(ddp, groups: ProcessGroupCollection) -> bool:
    """Whether no gradient of the step holds a NaN or an infinity, on any rank. Collective; every rank gets one answer.

    ddp: the DDP-wrapped model, after `finalize_gradients` and before `step_optimizer`.
    """
    buffers = ddp.buffers + ddp.expert_parallel_buffers
    finite = all(_all_finite(buffer.grad_data) for buffer in buffers)
    flag = torch.tensor(float(finite), device=buffers[0].grad_data.device)
    for group in (groups.dp_cp, groups.tp):
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    return bool(flag.item())


def _all_finite(values: torch.Tensor) -> bool:
    """Whether all values are finite, without a tensor of their size (torch's extrema let a NaN through)."""
    if not values.numel():
        return True
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) and torch.isfinite(high))


def name_nonfinite_gradients(ddp, groups: ProcessGroupCollection) -> list[str]:
    """Names of the parameters whose gradient holds a NaN or an infinity on any rank. Collective; sorted, no repeats.

    An expert's name has its number of all experts.
    """
    found = {
        whole_name(name, ddp.config.num_moe_experts, groups.ep.rank(), groups.ep.size())
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and hasattr(parameter, "main_grad") and not _all_finite(parameter.main_grad)
    }
    for group in (groups.dp_cp, groups.tp):
        gathered = [None] * group.size()
        dist.all_gather_object(gathered, found, group=group)
        found = set().union(*gathered)
    return sorted(found)


def clip_gradients(optimizer: MegatronOptimizer) -> float:
    """Scale prepared gradients down to the norm --clip-grad (0: not at all); returns the norm before. Collective.

    The norm is over every parameter once: experts of other ranks count, copies of the same expert do not.
    """
    with cuda_means_cpu():
        norm = float(optimizer.get_grad_norm())
        if optimizer.config.clip_grad > 0.0 and math.isfinite(norm):
            for part in parts_of(optimizer):
                clip_grad_by_total_norm_fp32(part.get_parameters(), optimizer.config.clip_grad, norm)
    return norm


def step_optimizer(optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler) -> tuple[bool, float]:
    """Clip the gradients, update the weights and advance the schedules, or do none of it. Collective.

    Returns:
        Whether the step was taken, and the gradient's norm before clipping, over all parameters of all ranks. It is not
        taken, and nothing has moved, when the norm is not finite (finite gradients can be that large).
    """
    with cuda_means_cpu():
        optimizer.prepare_grads()
        norm = clip_gradients(optimizer)
    if not math.isfinite(norm):
        return False, norm
    optimizer.step_with_ready_grads()  # names no device, and is long: outside the block
    scheduler.step(increment=1)
    return True, norm
