"""Flags that would do nothing, because what reads them is not there: refused, so that no one believes them.

Two reasons: the model has no layer of the kind that a flag is about, or another flag that switches a part on is not
there.
Only flags given on the command line count. Left out: flags that merely repeat what happens anyway beside the part that
reads them, such as --no-load-optim with --finetune.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping

from megatron.grpo.logra_flags import LOGRA_SWITCHES
from megatron.grpo.presets import ModelPreset

_KINDS: tuple[tuple[str, str, Callable[[ModelPreset], bool]], ...] = (
    ("gated delta net layers", "linear_* recurrent_state_residency", lambda preset: preset.hybrid),
    ("latent attention", "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim",
     lambda preset: preset.multi_latent_attention),
    ("sparse attention", "dsa_* index_page_residency selection_residency", lambda preset: preset.sparse),
    ("experts", "moe_* rollout_router_replay", lambda preset: preset.has_experts),
    ("norms of queries and keys", "apply_wd_to_qk_layernorm", lambda preset: preset.qk_layernorm),
)
"""(what a model may have, the destinations about it (* stands for any ending), whether a preset has it)."""

_SWITCHES: tuple[tuple[str, str, Callable[[Namespace], bool]], ...] = (
    ("eval_interval eval_samples", "--eval-data, the held-out prompts", lambda args: bool(args.eval_data)),
    ("save_retain_interval no_save_optim no_save_rng ckpt_fully_parallel_save", "--save, the folder of the checkpoints",
     lambda args: bool(args.save)),
    ("finetune no_load_optim no_load_rng", "--load or --pretrained-checkpoint",
     lambda args: bool(args.load or args.pretrained_checkpoint)),
    ("override_opt_param_scheduler use_checkpoint_opt_param_scheduler", "--load, the folder of the checkpoints",
     lambda args: bool(args.load)),
    ("rollout_steps", "--rollout-only", lambda args: args.rollout_only),
    ("rollout_is_cap", "--rollout-is token or sequence", lambda args: args.rollout_is != "none"),
    ("weight_sync_full_interval", "--weight-sync delta", lambda args: args.weight_sync == "delta"),
    ("weight_sync_keep", "--weight-sync full, delta or lora", lambda args: args.weight_sync != "none"),
    ("kl_estimator", "--kl-coefficient above 0", lambda args: args.kl_coefficient > 0),
    ("group_filter_retries", "--group-filter drop_uniform", lambda args: args.group_filter == "drop_uniform"),
    ("reward_baseline_decay", "--advantage-estimator running_mean",
     lambda args: args.advantage_estimator == "running_mean"),
    ("recompute_modules", "--recompute-granularity selective", lambda args: args.recompute_granularity is not None),
    ("lr_wsd_decay_style lr_wsd_decay_iters", "--lr-decay-style WSD", lambda args: args.lr_decay_style == "WSD"),
    ("min_lr", "an --lr-decay-style other than constant", lambda args: args.lr_decay_style != "constant"),
    ("lr_decay_iters", "an --lr-decay-style other than constant, or --lr-warmup-fraction",
     lambda args: args.lr_decay_style != "constant" or args.lr_warmup_fraction is not None),
    ("lr_warmup_init", "--lr-warmup-iters or --lr-warmup-fraction",
     lambda args: bool(args.lr_warmup_iters or args.lr_warmup_fraction)),
    ("dsa_indexer_use_sparse_loss", "--dsa-indexer-loss-coeff above 0", lambda args: bool(args.dsa_indexer_loss_coeff)),
    ("decoupled_min_lr", "--decoupled-lr", lambda args: args.decoupled_lr is not None),
    ("lora_alpha", "--lora-rank above 0", lambda args: args.lora_rank > 0),
    ("decoupled_lr apply_wd_to_qk_layernorm", "--lora-rank 0, since LoRA freezes what it is about",
     lambda args: args.lora_rank == 0),
    ("wandb_exp_name wandb_save_dir wandb_entity", "--wandb-project", lambda args: bool(args.wandb_project)),
    *LOGRA_SWITCHES,
)
"""(destinations, the flags that they need in words, whether these are there)."""

_JUDGED_ELSEWHERE = ("dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss")
"""Flags of a kind of layer that `flag_policy` judges together: a coefficient of 0 is in force everywhere."""


def find_idle_flags(args: Namespace, preset: ModelPreset, show: Mapping[str, str]) -> list[str]:
    """One sentence for each flag that nothing would read.

    args: the parsed namespace. preset: the one that --model-preset names, without explicit flags, which cannot add a
    kind of layer. show: destination -> the flag as typed, with its value, of the flags on the command line.
    """
    found = []
    for name, shown in show.items():
        missing = [
            f"{shown}: --model-preset {preset.name} has no {kind}"
            for kind, names, has in _KINDS
            if name not in _JUDGED_ELSEWHERE and not has(preset)
            and any(_matches(name, pattern) for pattern in names.split())
        ] + [
            f"{shown} is read only with {needed}"
            for names, needed, is_there in _SWITCHES
            if name in names.split() and not is_there(args)
        ]
        found += missing[:1]
    return found


def _matches(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
