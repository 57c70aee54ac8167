"""The settings that a receipt holds: of the loss, of the optimizer, and of where responses and rewards come from.

Two runs that differ in any of them are different computations, and `longstraw.receipts.compare` says so. Left out: what changes
only how a step is computed (chunk sizes, residencies), which the command has.
"""

from argparse import Namespace
from dataclasses import asdict

from megatron.grpo.run_config import TrainConfig

_RATES = (
    "lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "lr_warmup_fraction", "lr_warmup_init",
    "lr_wsd_decay_style", "lr_wsd_decay_iters", "decoupled_lr", "decoupled_min_lr", "train_iters", "start_weight_decay",
    "weight_decay", "end_weight_decay", "weight_decay_incr_style", "apply_wd_to_qk_layernorm", "adam_beta1", "adam_beta2",
    "adam_eps", "decoupled_weight_decay", "clip_grad", "use_precision_aware_optimizer", "main_params_dtype", "main_grads_dtype",
    "exp_avg_dtype", "exp_avg_sq_dtype", "accumulate_allreduce_grads_in_fp32",
)
"""Megatron's flags of Adam, of its schedules and of the precision of its state."""


def describe_objective(args: Namespace, config: TrainConfig) -> dict:
    """`Receipt.objective`: the loss, and which responses and tokens take part in it."""
    return asdict(config.objective) | {
        "mask_truncated": config.run.mask_truncated, "reference_checkpoint": config.run.reference_checkpoint,
        "dsa_indexer_loss_coeff": getattr(args, "dsa_indexer_loss_coeff", None),
    }


def describe_update(args: Namespace, config: TrainConfig) -> dict:
    """`Receipt.update`: how the weights move. Rates that no part of LoGRA reads are left out."""
    found: dict = {"optimizer": args.optimizer}
    if config.lora.lora_rank:
        found |= asdict(config.lora)
    if args.optimizer != "logra" or config.logra.logra_train_rest or config.logra.update_step_size == "learning-rate":
        found |= {name: _plain(getattr(args, name)) for name in _RATES if hasattr(args, name)}
    return found | (asdict(config.logra) if args.optimizer == "logra" else {})


def describe_responses(config: TrainConfig) -> dict:
    """Part of `Receipt.rollout`: how responses are sampled and rewarded, and what is done where the sampler disagrees."""
    rewards = config.rewards
    weights = rewards.reward_weights or [1.0] * len(rewards.reward)
    return asdict(config.sampling) | asdict(config.mismatch) | {
        "rewards": ", ".join(f"{weight:g} {name}" for name, weight in zip(rewards.reward, weights)),
        "reward_failure": rewards.reward_failure, "rollout_router_replay": config.rollouts.rollout_router_replay,
    }


def _plain(value):
    """A setting as JSON has it: a torch dtype by its name."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value).removeprefix("torch.")
