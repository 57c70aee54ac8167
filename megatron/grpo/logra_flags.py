"""What `--optimizer logra` cannot be combined with, and flags of it that nothing would read.

Pure functions over the parsed namespace; no Megatron import here.
"""

from argparse import Namespace
from collections.abc import Callable

from megatron.grpo.presets import ModelPreset


def check_logra(args: Namespace, preset: ModelPreset) -> list[str]:
    """One sentence for each combination that cannot be run."""
    if args.optimizer != "logra":
        return []
    found = []
    if args.transformer_impl != "local":
        found.append(
            f"--optimizer logra needs --transformer-impl local, not {args.transformer_impl}: the sketch is added where a "
            "linear multiplies"
        )
    if args.use_distributed_optimizer and args.update_direction == "dense":
        found.append(
            "--use-distributed-optimizer leaves each rank a part of the gradient: with --optimizer logra use "
            "--update-direction sketch"
        )
    if args.update_step_size == "predicted-kl" and args.kl_probe == "jvp" and (
        preset.has_experts or preset.multi_latent_attention
    ):
        found.append(
            f"--kl-probe jvp does not go through the experts or the latent attention of --model-preset {preset.name}: use "
            "--kl-probe finite-difference"
        )
    if args.update_step_size == "predicted-kl" and args.kl_probe == "jvp" and args.recompute_granularity is not None:
        found.append(
            f"--kl-probe jvp does not go through layers that are recomputed: with --recompute-granularity {args.recompute_granularity} use "
            "--kl-probe finite-difference"
        )
    if args.dsa_indexer_loss_coeff and not args.logra_train_rest:
        found.append(
            "--dsa-indexer-loss-coeff trains the indexer, which --optimizer logra freezes without --logra-train-rest"
        )
    return found


_WITH = "--optimizer logra"
_SKETCH = "--optimizer logra with --update-direction sketch"
_KL = "--optimizer logra with --update-step-size predicted-kl"


def _is_sketch(args: Namespace) -> bool:
    return args.optimizer == "logra" and args.update_direction == "sketch"


def _is_kl(args: Namespace) -> bool:
    return args.optimizer == "logra" and args.update_step_size == "predicted-kl"


LOGRA_SWITCHES: tuple[tuple[str, str, Callable[[Namespace], bool]], ...] = (
    ("update_direction update_rule update_step_size logra_train_rest", _WITH, lambda args: args.optimizer == "logra"),
    ("logra_rank logra_projection logra_refresh logra_seed logra_cosine_of logra_delta_dir", _SKETCH, _is_sketch),
    ("logra_masters logra_master_residency", "--optimizer logra with --bf16",
     lambda args: args.optimizer == "logra" and args.bf16),
    ("logra_beta2", "--optimizer logra with --update-rule rowadam",
     lambda args: args.optimizer == "logra" and args.update_rule == "rowadam"),
    ("logra_update_ratio", "--optimizer logra with --update-step-size update-ratio or predicted-kl",
     lambda args: args.optimizer == "logra" and args.update_step_size != "learning-rate"),
    ("kl_budget kl_budget_schedule kl_alpha_max kl_probe kl_probe_scope kl_probe_tokens kl_probe_responses "
     "kl_probe_prompts kl_mismatch_weight kl_budget_floor kl_refused_step", _KL, _is_kl),
    ("kl_budget_final kl_budget_steps", _KL + " and --kl-budget-schedule cosine",
     lambda args: _is_kl(args) and args.kl_budget_schedule == "cosine"),
    ("kl_probe_step", _KL + " and --kl-probe finite-difference",
     lambda args: _is_kl(args) and args.kl_probe == "finite-difference"),
)
"""(destinations, the flags that they need in words, whether these are there): for `megatron.grpo.idle_flags`."""
