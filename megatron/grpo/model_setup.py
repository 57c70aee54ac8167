"""From the command line's namespace to the model: its configuration, the model itself, and DDP around it.

Left out: loading weights (`megatron.grpo.checkpointing`).
"""

from argparse import Namespace

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.argument_utils import core_transformer_config_from_args

from longstraw.patches.device import cuda_available, cuda_means_cpu, current_device
from megatron.grpo.arguments import resolve_preset
from megatron.grpo.lora import start_pairs
from megatron.grpo.model_provider import build_model, synchronize_parameters
from megatron.grpo.random_states import derive_seed
from megatron.grpo.sharding import whole_name


def transformer_config(args: Namespace) -> TransformerConfig:
    """Megatron's configuration of the model, from Megatron's namespace.

    Without a GPU the gated delta net has only its deterministic form, in torch, so that is what it gets.
    """
    values = Namespace(**vars(args))
    if not cuda_available() and args.experimental_attention_variant == "gated_delta_net":
        values.deterministic_mode = True
    return core_transformer_config_from_args(values)


def build_training_model(args: Namespace, groups: ProcessGroupCollection) -> torch.nn.Module:
    """The stateful model on the current device, with equal weights on every rank that holds the same part of it.

    Collective. The weights are drawn from the global random state (`initialize` seeds it); with experts and
    --use-cpu-initialization from --seed and their names, so that they do not depend on --expert-model-parallel-size.
    With --lora-rank it is frozen, up to its low-rank pairs.
    Raises ValueError where the parallel sizes do not divide what they have to, or a matrix has no such rank.
    """
    preset = resolve_preset(args)
    model = build_model(preset, transformer_config(args), groups, padded_vocab_size=args.padded_vocab_size)
    if preset.has_experts and args.use_cpu_initialization:
        draw_by_name(model, args.seed, groups)
    if args.lora_rank:
        start_pairs(model, args.lora_rank, args.lora_alpha, args.seed, groups)
    model = model.to(current_device())
    if args.bf16:
        model = model.bfloat16()
    synchronize_parameters(model, groups.dp_cp, groups.expt_dp)
    return model


@torch.no_grad()
def draw_by_name(model: torch.nn.Module, seed: int, groups: ProcessGroupCollection) -> None:
    """Draw every matrix of a model without tensor parallelism from the seed and its whole name.

    Megatron draws one after another from one generator: an expert-parallel rank would get the same numbers for its
    experts as the first rank for other experts, and all that is drawn after them would depend on how many a rank has.
    """
    config = model.config
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        whole = whole_name(name, config.num_moe_experts, groups.ep.rank(), groups.ep.size())
        draw = config.embedding_init_method if name.startswith("embedding.") else config.init_method
        if ends_a_block(name):
            draw = config.output_layer_init_method
        with torch.random.fork_rng(devices=[]):
            # torch.manual_seed would seed, or write down for later, every other device too: milliseconds each
            torch.default_generator.manual_seed(derive_seed(seed, whole))
            parameter.copy_(draw(torch.empty(parameter.shape)))


def ends_a_block(name: str) -> bool:
    """Whether a matrix writes into the residual stream: Megatron scales its initial values by the depth."""
    return name.endswith(("linear_proj.weight", "linear_fc2.weight"))


def wrap_model(args: Namespace, model: torch.nn.Module, groups: ProcessGroupCollection) -> DistributedDataParallel:
    """Megatron's DDP around the model: `main_grad` buffers that are summed once a step.

    Gradients are sums (`calculate_per_token_loss`); with --bf16 they accumulate and reduce in float32. DDP's own NaN
    check is off: it would end the run where `megatron.grpo.optimizer` rolls the step back.
    """
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=False,
        use_distributed_optimizer=args.use_distributed_optimizer,
        check_for_nan_in_grad=False,
    )
    with cuda_means_cpu():
        return DistributedDataParallel(model.config, config, model, pg_collection=groups)
