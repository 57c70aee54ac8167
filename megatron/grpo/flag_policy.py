"""Which of Megatron's 800 flags this program takes, and what it says of the others.

A flag that Megatron would act on and this program would not is worse than an unknown one: the run starts, and its
gradient or its data is not what was asked for. So the list is of what is taken. Any other Megatron flag that is given a
value other than the one the program works with anyway is refused at start-up: with its reason where there is one to
give, otherwise with the sentence that the program does not read it.

Pure functions over the parsed namespace; no Megatron import here.
"""

from argparse import Namespace
from collections.abc import Iterable, Mapping

from longstraw.patches.world_sizes import find_misfits
from megatron.grpo.logra_flags import check_logra
from megatron.grpo.weight_sync_config import check_weight_sync
from megatron.grpo.presets import ModelPreset, get_preset

_PRESET_FLAGS = """
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups group_query_attention kv_channels
    vocab_size make_vocab_size_divisible_by max_position_embeddings rotary_base rotary_percent position_embedding_type
    normalization layernorm_epsilon layernorm_zero_centered_gamma swiglu add_bias_linear add_qkv_bias qk_layernorm
    attention_output_gate untie_embeddings_and_output_weights init_method_std
    linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads
    linear_num_value_heads transformer_impl
    q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim dsa_indexer_n_heads dsa_indexer_head_dim
    dsa_indexer_topk dsa_indexer_topk_freq dsa_indexer_skip_topk_offset dsa_indexer_rope_interleaved
    dsa_indexer_k_norm_epsilon
    num_experts moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_router_topk
    moe_router_score_function moe_router_enable_expert_bias moe_router_topk_scaling_factor moe_router_num_groups
    moe_router_group_topk
"""
_TRAINING_FLAGS = """
    train_iters eval_interval seed deterministic_mode use_cpu_initialization bf16 accumulate_allreduce_grads_in_fp32
    recompute_granularity recompute_modules dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss
    optimizer adam_beta1 adam_beta2 adam_eps weight_decay start_weight_decay end_weight_decay weight_decay_incr_style
    apply_wd_to_qk_layernorm clip_grad
    lr min_lr decoupled_lr decoupled_min_lr lr_decay_style lr_decay_iters lr_warmup_iters lr_warmup_fraction
    lr_warmup_init lr_wsd_decay_style lr_wsd_decay_iters override_opt_param_scheduler
    use_checkpoint_opt_param_scheduler
"""
_LAUNCH_FLAGS = """
    tensor_model_parallel_size context_parallel_size expert_model_parallel_size sequence_parallel
    use_distributed_optimizer distributed_backend distributed_timeout_minutes local_rank moe_router_dtype
    moe_grouped_gemm
"""
_CHECKPOINT_FLAGS = """
    save load save_interval save_retain_interval pretrained_checkpoint finetune ckpt_step exit_on_missing_checkpoint
    exit_interval exit_duration_in_mins
    no_save_optim no_save_rng no_load_optim no_load_rng ckpt_fully_parallel_save
"""
_LOGGING_FLAGS = """
    tensorboard_dir tensorboard_queue_size wandb_project wandb_exp_name wandb_save_dir wandb_entity logging_level
"""
TAKEN = frozenset(
    " ".join([_PRESET_FLAGS, _TRAINING_FLAGS, _LAUNCH_FLAGS, _CHECKPOINT_FLAGS, _LOGGING_FLAGS]).split()
)
"""Destinations of the Megatron flags that this program reads."""

OPTIMIZERS = ("adam", "logra")
"""Values of --optimizer."""

WORKING_VALUES = dict(
    micro_batch_size=1, calculate_per_token_loss=True, hidden_dropout=0.0, attention_dropout=0.0,
    gradient_accumulation_fusion=False, masked_softmax_fusion=False, bias_dropout_fusion=False,
    bias_swiglu_fusion=False, bias_gelu_fusion=False, apply_rope_fusion=False, no_persist_layer_norm=True,
    enable_one_logger=False, lr=1e-6, lr_decay_style="constant",
)
"""Defaults of Megatron's flags that differ here. Those not in TAKEN cannot be changed."""

_EXACT = "the gradient is computed block by block from saved states"
_REASONS = {
    "pipeline_model_parallel_size": "pipeline parallelism is not supported: use --tensor-model-parallel-size and "
    "--context-parallel-size",
    "num_layers_per_virtual_pipeline_stage": "there is no pipeline, so no virtual stages either",
    "num_virtual_stages_per_pipeline_rank": "there is no pipeline, so no virtual stages either",
    "pipeline_model_parallel_layout": "there is no pipeline",
    "hidden_dropout": f"{_EXACT}, and a block run again would draw another mask: dropout must be 0",
    "attention_dropout": f"{_EXACT}, and a block run again would draw another mask: dropout must be 0",
    "overlap_grad_reduce": "a step has any number of backward passes, and overlapping would reduce a bucket too early",
    "overlap_param_gather": "it needs --overlap-grad-reduce, which is not supported",
    "expert_tensor_parallel_size": "experts are not cut: use --expert-model-parallel-size",
    "multi_latent_attention": "the kind of attention comes with --model-preset",
    "experimental_attention_variant": "the kind of attention comes with --model-preset",
    "rope_type": "the kind of rotary angles comes with --model-preset",
    "moe_router_load_balancing_type": "a balancing loss is no part of GRPO's loss, and sinkhorn and quantile balancing "
    "choose experts anew instead of repeating the recorded choice",
    "moe_aux_loss_coeff": "a balancing loss is no part of GRPO's loss",
    "moe_z_loss_coeff": "a loss on the router's logits is no part of GRPO's loss",
    "moe_router_fusion": "a fused router chooses experts anew instead of repeating the recorded choice",
    "moe_router_pre_softmax": "gates are normalised over the chosen experts",
    "moe_router_bias_update_rate": "the bias of the experts is frozen: a step that rolls back must leave it",
    "moe_router_force_load_balancing": "random choices of experts could not be repeated",
    "moe_router_force_biased": "random choices of experts could not be repeated",
    "moe_input_jitter_eps": f"{_EXACT}, and a block run again would draw other noise",
    "moe_enable_routing_replay": "choices of experts are always recorded and repeated, and not by Megatron's record",
    "moe_token_dispatcher_type": "tokens go to experts by all-to-all",
    "moe_enable_deepep": "tokens go to experts by all-to-all",
    "moe_expert_capacity_factor": "dropped tokens would make the gradient depend on how blocks are cut",
    "moe_pad_expert_input_to_capacity": "dropped tokens would make the gradient depend on how blocks are cut",
    "moe_token_drop_policy": "dropped tokens would make the gradient depend on how blocks are cut",
    "moe_layer_recompute": "only the dense MLP can be recomputed: --recompute-granularity selective --recompute-modules mlp",
    "moe_use_upcycling": "the architecture comes from --model-preset",
    "mtp_num_layers": "multi-token prediction layers are not supported: their loss is not part of GRPO's",
    "fp16": "the loss scaling of fp16 is not supported: use --bf16",
    "loss_scale": "the loss is not scaled here, so the optimizer would divide the gradient by a factor it never had",
    "initial_loss_scale": "the loss is never scaled here",
    "ddp_bucket_size": "gradients are summed once a step, in one bucket",
    "ddp_num_buckets": "gradients are summed once a step, in one bucket",
    "grad_reduce_in_bf16": "gradients are summed in float32",
    "fp8": "fp8 is not supported: its scaling history would advance with every recomputation",
    "fp4": "fp4 is not supported",
    "fp8_param_gather": "fp8 is not supported",
    "first_last_layers_bf16": "fp8 is not supported",
    "use_megatron_fsdp": "fully sharded parameters are not supported: use --use-distributed-optimizer",
    "use_torch_fsdp2": "fully sharded parameters are not supported: use --use-distributed-optimizer",
    "cp_comm_type": "context parallelism exchanges queries or pages in its own way",
    "hierarchical_context_parallel_sizes": "context parallelism has one level here",
    "hybrid_context_parallel": "context parallelism has one layout here: contiguous chunks",
    "micro_batch_size": "there are no micro-batches: --responses-per-replay says how many responses run together",
    "global_batch_size": "a step's size is --prompts-per-step times --group-size",
    "rampup_batch_size": "a step's size is --prompts-per-step times --group-size, and stays the same",
    "step_batch_size_schedule": "a step's size is --prompts-per-step times --group-size, and stays the same",
    "train_samples": "a run's length is --train-iters, in optimizer steps",
    "lr_decay_samples": "schedules count optimizer steps: use --lr-decay-iters",
    "lr_warmup_samples": "schedules count optimizer steps: use --lr-warmup-iters",
    "lr_wsd_decay_samples": "schedules count optimizer steps: use --lr-wsd-decay-iters",
    "seq_length": "lengths come from the data and from --max-response-length; --max-position-embeddings bounds them",
    "encoder_seq_length": "lengths come from the data and from --max-response-length",
    "decoder_seq_length": "lengths come from the data and from --max-response-length",
    "mock_data": "prompts come from --prompt-data",
    "split": "held-out prompts come from --eval-data",
    "eval_iters": "an evaluation's size is --eval-samples",
    "tokenizer_type": "the tokenizer comes from --tokenizer-path",
    "tokenizer_model": "the tokenizer comes from --tokenizer-path",
    "chat_template": "the chat template comes with --tokenizer-path",
    "perform_rl_step": "this program is the RL step; Megatron's own RL loop is another one",
    "yaml_cfg": "there is no YAML here: settings are flags",
    "spec": "the layers come from --model-preset",
    "async_save": "checkpoints are saved synchronously",
    "ckpt_format": "checkpoints are torch_dist only",
    "use_checkpoint_args": "the architecture comes from --model-preset, and a checkpoint of another one is refused",
    "recompute_activations": "only the MLP can be recomputed: --recompute-granularity selective --recompute-modules mlp",
    "recompute_method": "only the MLP can be recomputed: --recompute-granularity selective --recompute-modules mlp",
    "recompute_num_layers": "only the MLP can be recomputed: --recompute-granularity selective --recompute-modules mlp",
    "data_parallel_random_init": "every data-parallel rank must hold the same weights",
    "freeze_all_layers": "there would be nothing to train",
    "skip_train": "evaluation alone is not supported",
    "exit_signal_handler": "SIGTERM always ends the run after its step, with a checkpoint",
    "exit_signal": "SIGTERM always ends the run after its step, with a checkpoint",
    "check_for_nan_in_loss_and_grad": "a step whose loss or gradient is not finite is always rolled back",
    "enable_cuda_graph": "CUDA graphs are not supported: blocks differ in length",
    "external_cuda_graph": "CUDA graphs are not supported: blocks differ in length",
    "window_size": "attention reads the whole prompt: sliding windows are not supported",
    "rotary_interleaved": "rotary pairs are halves of a head, not neighbours",
    "use_rope_scaling": "rotary frequencies are not rescaled",
    "use_flash_attn": "the attention kernel is chosen by what is installed",
    "attention_backend": "the attention kernel is chosen by what is installed",
    "log_interval": "every step is logged",
}
_REASONS_BY_PREFIX = {
    "grpo_": "it belongs to Megatron's own RL loop; this program's flags are listed first in --help",
    "rl_": "it belongs to Megatron's own RL loop; this program's flags are listed first in --help",
    "moe_": "this setting of experts is not supported",
    "mtp_": "multi-token prediction layers are not supported",
    "dsa_": "this setting of sparse attention is not supported",
    "mla_": "this setting of latent attention is not supported",
    "fp8_": "fp8 is not supported",
    "fp4_": "fp4 is not supported",
    "cuda_graph": "CUDA graphs are not supported: blocks differ in length",
    "inference_": "rollouts come from this program's own engine",
    "megatron_fsdp_": "fully sharded parameters are not supported: use --use-distributed-optimizer",
    "fsdp_": "fully sharded parameters are not supported: use --use-distributed-optimizer",
    "recompute_": "only the MLP can be recomputed: --recompute-granularity selective --recompute-modules mlp",
    "non_persistent_": "checkpoints are saved to --save only",
}
_REASONS_BY_SUFFIX = {"data_path": "prompts come from --prompt-data, held-out ones from --eval-data"}


def explain(destination: str) -> str:
    """Why a Megatron flag that is not taken is refused."""
    if destination in _REASONS:
        return _REASONS[destination]
    for prefix, reason in _REASONS_BY_PREFIX.items():
        if destination.startswith(prefix):
            return reason
    for suffix, reason in _REASONS_BY_SUFFIX.items():
        if destination.endswith(suffix):
            return reason
    return "this program does not read this flag of Megatron-LM"


def refuse_flags(
    explicit: Mapping[str, object], working: Mapping[str, object], spelling: Mapping[str, str], ours: Iterable[str]
) -> list[str]:
    """One sentence for each Megatron flag that is given and not taken.

    explicit: destination -> value, of the flags on the command line. working: destination -> the value in force
    without the flag; repeating it is harmless. spelling: destination -> the flag as typed. ours: our own destinations.
    """
    taken = TAKEN.union(ours)
    return [
        f"{spelling[name]}{show_value(value)}: {explain(name)}"
        for name, value in explicit.items()
        if name not in taken and value != working.get(name)
    ]


def show_value(value: object) -> str:
    """A flag's value as it stands behind the flag; nothing for a switch."""
    if isinstance(value, bool):
        return ""
    return " " + " ".join(str(v) for v in value) if isinstance(value, (list, tuple)) else f" {value}"


def check_values(args: Namespace, preset: ModelPreset, *, cuda: bool, fused_adam: bool, world_size: int) -> list[str]:
    """One sentence for each taken flag whose value, or combination with another, cannot be run.

    args: the parsed namespace. preset: the architecture with explicit flags applied. cuda: whether a CUDA device is
    there. fused_adam: whether Megatron's Adam is Transformer Engine's or Apex's. world_size: number of ranks.
    """
    return [
        *_check_training(args),
        *_check_model(args, preset),
        *_check_lora(args),
        *check_weight_sync(args, preset),
        *_check_parallel_sizes(args, preset, world_size),
        *_check_device(args, cuda, fused_adam),
        *_check_checkpoints(args),
        *check_logra(args, preset),
    ]


def _check_training(args: Namespace) -> list[str]:
    found = []
    if not args.train_iters or args.train_iters < 1:
        found.append("--train-iters is required: the number of optimizer steps, at least 1")
    if args.eval_interval is not None and args.eval_interval < 1:
        found.append(f"--eval-interval must be at least 1, not {args.eval_interval}")
    for flag, value in (("--exit-interval", args.exit_interval), ("--exit-duration-in-mins", args.exit_duration_in_mins)):
        if value is not None and value < 1:
            found.append(f"{flag} must be at least 1, not {value}")
    if args.optimizer not in OPTIMIZERS:
        found.append(f"--optimizer {args.optimizer} is not supported: use --optimizer {' or '.join(OPTIMIZERS)}")
    if args.lr < args.min_lr:
        found.append(f"--min-lr {args.min_lr} is above --lr {args.lr}")
    if args.lr < args.lr_warmup_init:
        found.append(f"--lr-warmup-init {args.lr_warmup_init} is above --lr {args.lr}")
    decay = args.lr_decay_iters or args.train_iters
    if decay and args.lr_warmup_iters >= decay:
        found.append(f"--lr-warmup-iters {args.lr_warmup_iters} must be below --lr-decay-iters {decay} "
                     "(--train-iters where it is not given)")
    if args.lr_warmup_fraction is not None and args.lr_warmup_iters:
        found.append("--lr-warmup-fraction and --lr-warmup-iters exclude each other")
    if args.lr_decay_style == "WSD" and args.lr_wsd_decay_iters is None:
        found.append("--lr-decay-style WSD needs --lr-wsd-decay-iters")
    if args.weight_decay_incr_style == "constant":
        if args.start_weight_decay is not None or args.end_weight_decay is not None:
            found.append("--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or cosine")
    elif args.start_weight_decay is None or args.end_weight_decay is None:
        found.append(
            f"--weight-decay-incr-style {args.weight_decay_incr_style} needs --start-weight-decay and --end-weight-decay"
        )
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        found.append("--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other")
    if args.recompute_granularity == "full" or (
        args.recompute_granularity == "selective" and args.recompute_modules != ["mlp"]
    ):
        found.append(
            f"--recompute-granularity {args.recompute_granularity} would run attention again inside the backward pass, "
            "after its block's state is gone: use --recompute-granularity selective --recompute-modules mlp"
        )
    if args.wandb_project and not args.wandb_exp_name:
        found.append("--wandb-project needs --wandb-exp-name")
    return found


def _check_model(args: Namespace, preset: ModelPreset) -> list[str]:
    wanted = {
        "position_embedding_type": ("--position-embedding-type", ("rope",)),
        "normalization": ("--normalization", ("RMSNorm",)),
        "transformer_impl": ("--transformer-impl", ("local", "transformer_engine")),
    }
    found = [
        f"{flag} {getattr(args, name)} is not supported: use {flag} {' or '.join(values)}"
        for name, (flag, values) in wanted.items()
        if getattr(args, name) not in values
    ]
    if preset.has_experts and not get_preset(args.model_preset).has_experts:
        found.append(f"--num-experts {preset.num_experts} needs a --model-preset with experts, unlike {preset.name}")
    if args.dsa_indexer_loss_coeff and not preset.sparse:
        found.append(f"--dsa-indexer-loss-coeff needs a --model-preset with sparse attention, unlike {preset.name}")
    elif args.dsa_indexer_loss_coeff and (args.dsa_indexer_loss_coeff < 0 or not args.dsa_indexer_use_sparse_loss):
        found.append(
            f"--dsa-indexer-loss-coeff {args.dsa_indexer_loss_coeff} needs to be at least 0, and --dsa-indexer-use-sparse-loss: "
            "the loss is over the selected keys"
        )
    if args.moe_grouped_gemm and args.transformer_impl != "transformer_engine":
        found.append("--moe-grouped-gemm needs --transformer-impl transformer_engine")
    return found


def _check_lora(args: Namespace) -> list[str]:
    if args.lora_rank < 1:
        return []
    found = []
    if args.transformer_impl == "transformer_engine":
        found.append(
            f"--lora-rank {args.lora_rank} needs --transformer-impl local: the product of Transformer Engine's linears is "
            "inside one kernel"
        )
    if args.dsa_indexer_loss_coeff:
        found.append(
            f"--lora-rank {args.lora_rank} freezes the indexer, which --dsa-indexer-loss-coeff "
            f"{args.dsa_indexer_loss_coeff} would train"
        )
    if args.optimizer == "logra":
        found.append(f"--lora-rank {args.lora_rank} freezes the weights that --optimizer logra would move: use one of them")
    return found


def _check_parallel_sizes(args: Namespace, preset: ModelPreset, world_size: int) -> list[str]:
    found = []
    names = ("tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size")
    for name in names:
        if getattr(args, name) < 1:
            return [f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}"]
    tp, cp, ep = (getattr(args, name) for name in names)
    found += find_misfits(world_size, tensor_parallel=tp, context_parallel=cp, expert_parallel=ep)
    if preset.ffn_hidden_size % tp:
        found.append(f"--tensor-model-parallel-size {tp} does not divide --ffn-hidden-size {preset.ffn_hidden_size}")
    if args.sequence_parallel and tp == 1:
        found.append("--sequence-parallel needs --tensor-model-parallel-size above 1")
    return found


def _check_device(args: Namespace, cuda: bool, fused_adam: bool) -> list[str]:
    found = []
    if args.use_distributed_optimizer and not (cuda and fused_adam):
        found.append(
            "--use-distributed-optimizer needs a GPU and the Adam of Transformer Engine or Apex: with torch's, a "
            "checkpoint of its shards loses the step count"
        )
    if cuda:
        return found
    if args.transformer_impl == "transformer_engine":
        found.append("--transformer-impl transformer_engine needs a GPU: use --transformer-impl local")
    if args.distributed_backend == "nccl":
        found.append("--distributed-backend nccl needs a GPU: use --distributed-backend gloo")
    return found


def _check_checkpoints(args: Namespace) -> list[str]:
    found = []
    if args.save_interval is not None and args.save_interval < 1:
        found.append(f"--save-interval must be at least 1, not {args.save_interval}")
    if args.save_interval and not args.save:
        found.append("--save-interval needs --save, the folder of the checkpoints")
    if args.save and args.save_retain_interval is not None and (
        args.save_retain_interval < 1 or args.save_retain_interval % (args.save_interval or 1)
    ):
        found.append(
            f"--save-retain-interval {args.save_retain_interval} is not a multiple of --save-interval "
            f"{args.save_interval}"
        )
    if args.ckpt_step is not None and not args.load:
        found.append("--ckpt-step needs --load, the folder of the checkpoints")
    if args.exit_on_missing_checkpoint and not args.load:
        found.append("--exit-on-missing-checkpoint needs --load, the folder of the checkpoints")
    return found
