"""Compare the engine's gradients with one dense full-sequence autograd pass of the same Megatron modules.

Builds a model from a preset, draws random tokens for one prompt and several responses, and differentiates a weighted sum
of the responses' log-probabilities twice: with LongStraw (chunks, pages, states, parallel ranks, DDP and gradient
finalization), and densely (one process, float64, no state, no chunks, Megatron's own attention and delta rule). Prints
the relative error of every parameter's gradient. Exit code 0 means that it could measure; it never judges.

    python tools/audit_gradients.py --model-preset tiny-qwen3.6 --context-parallel-size 2 --json -
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from longstraw.patches.world_sizes import find_misfits
from megatron.grpo.presets import check_divisible, get_preset
from tools.local_ranks import is_rank, run_ranks
from tools.tool_flags import check_at_least_1, check_report_path, check_seed
from tools.tool_reports import write_report

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The tool's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model-preset", default="tiny-qwen3.6", help="architecture; see megatron/grpo/presets/")
    add("--prompt-length", type=int, default=157, help="tokens of the prompt")
    add("--response-lengths", default="5,17,1", help="tokens of each response, comma-separated")
    add("--chunk-size", type=int, default=43, help="tokens of the prompt per chunk")
    add("--block-size", type=int, default=8, help="tokens of a response per block")
    add("--context-parallel-size", type=int, default=1, help="ranks that share every chunk")
    add("--tensor-model-parallel-size", type=int, default=1, help="ranks that share every layer")
    add("--expert-model-parallel-size", type=int, default=1, help="of the context-parallel ranks, those that share the experts")
    add("--sequence-parallel", action="store_true", help="with tensor parallelism: shard activations by tokens too")
    add("--semantics", choices=("exact", "response_only"), default="exact", help="what the gradient is")
    add("--attention-output-residency", choices=("none", "host", "device"), default="none", help="as in training")
    add("--page-residency", choices=("device", "host"), default="device", help="as in training")
    add("--adjoint-residency", choices=("device", "host"), default="device", help="as in training")
    add("--recurrent-state-residency", choices=("device", "host"), default="device", help="as in training")
    add("--index-page-residency", choices=("device", "host"), default="device", help="as in training")
    add("--selection-residency", choices=("none", "host", "device"), default="none", help="as in training")
    add("--query-rows-at-once", type=int, default=4096, help="as in training")
    add("--attention-exchange", choices=("auto", "queries", "keys"), default="auto", help="as in training")
    add("--dtype", choices=tuple(DTYPES), default="float64", help="of the engine; the reference is float64")
    add("--seed", type=int, default=1, help="of weights and tokens")
    add("--json", default="-", metavar="PATH", help="where the report goes; - is standard output")
    args = parser.parse_args(argv)
    try:
        lengths = [int(n) for n in args.response_lengths.split(",")]
    except ValueError:
        parser.error(f"--response-lengths {args.response_lengths} are not whole numbers with commas between")
    if min(lengths) < 1:
        parser.error(f"each of --response-lengths is at least 1, not {min(lengths)}")
    args.response_lengths = lengths
    check_at_least_1(parser, args, (
        "prompt_length", "chunk_size", "block_size", "query_rows_at_once", "context_parallel_size",
        "tensor_model_parallel_size", "expert_model_parallel_size",
    ))  # fmt: skip
    check_seed(parser, args.seed)
    check_report_path(parser, args.json)
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        parser.error("--sequence-parallel needs --tensor-model-parallel-size above 1")
    try:
        check_divisible(get_preset(args.model_preset), args)
    except ValueError as error:
        parser.error(str(error))
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    for misfit in find_misfits(
        tp * cp, tensor_parallel=tp, context_parallel=cp, expert_parallel=args.expert_model_parallel_size
    ):
        parser.error(misfit)
    return args


def draw_tokens(args, vocab_size: int):
    """A prompt [1, P], responses [1, R] each, and a weight per response token [R], from the seed."""
    generator = torch.Generator().manual_seed(args.seed)
    prompt = torch.randint(vocab_size, (1, args.prompt_length), generator=generator)
    responses = [torch.randint(vocab_size, (1, n), generator=generator) for n in args.response_lengths]
    total = sum(args.response_lengths)
    weights = [torch.randn(n, generator=generator, dtype=torch.float64) / total for n in args.response_lengths]
    return prompt, responses, weights


def dense_gradients(model, prompt, responses, weights) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one full-sequence autograd pass per response of a conventional model."""
    loss = 0.0
    for response, weight in zip(responses, weights):
        ids = torch.cat([prompt, response[:, :-1]], 1)
        labels = torch.cat([prompt[:, 1:], response], 1)
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)[None, None]
        losses = model(ids, None, mask, labels=labels)[:, prompt.shape[1] - 1 :]
        term = (losses * weight).sum()
        term.backward()
        loss += term.item()
    # idle experts and indexers have none
    return loss, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def engine_gradients(args, model, groups, vocab_size, prompt, responses, weights):
    """Loss and whole (unsharded) gradients of the engine, through DDP and gradient finalization."""
    from longstraw.patches.finalize_model_grads import finalize_gradients, wrap_for_gradients
    from longstraw.segments import grow_group
    from longstraw.sweep_config import SweepConfig
    from longstraw.sweeps import ReplayEngine
    from megatron.grpo.sharding import gather_gradients

    config = SweepConfig(
        semantics=args.semantics, prompt_chunk_size=args.chunk_size, response_block_size=args.block_size,
        page_residency=args.page_residency, adjoint_residency=args.adjoint_residency,
        recurrent_state_residency=args.recurrent_state_residency,
        index_page_residency=args.index_page_residency, selection_residency=args.selection_residency,
        attention_output_residency=args.attention_output_residency, query_rows_at_once=args.query_rows_at_once,
        attention_exchange=args.attention_exchange,
    )
    ddp = wrap_for_gradients(model, groups, reduce_in_fp32=args.dtype == "bf16")
    device = next(model.parameters()).device
    engine = ReplayEngine(model, config, vocab_size=vocab_size)
    weights = [weight.to(device) for weight in weights]
    losses = [lambda logprobs, columns, w=w: -(logprobs * w[columns].to(logprobs.dtype)).sum() for w in weights]
    with ddp.no_sync():
        loss = engine.replay(grow_group(prompt.to(device), [r.to(device) for r in responses], losses))
    finalize_gradients(ddp, engine.adapters, groups)
    total = torch.tensor(loss, dtype=torch.float64, device=device)
    dist.all_reduce(total, group=groups.cp)
    whole = gather_gradients(model, get_preset(args.model_preset), groups)
    return total.item(), {name: gradient.double() for name, gradient in whole.items()}


def perturb_weights(model, seed: int) -> None:
    """Move norms, decay gates and biases of experts away from the values at which their gradients would be special."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
            if "norm" in name or name.endswith("dt_bias"):
                parameter += 0.2 * noise
            elif name.endswith("A_log"):
                parameter -= 3.0
            elif parameter.dim() == 2:
                parameter.copy_(noise * 0.15 if parameter.shape[0] < 1000 else noise * 0.05)
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator, dtype=torch.float64))


def build_pair(args, groups):
    """The conventional float64 model (every rank, equal weights) and the engine's model with the same weights."""
    from longstraw.patches.device import current_device
    from longstraw.patches.process_groups import seed_model_parallel, single_rank_groups
    from megatron.grpo.model_provider import build_conventional_model, build_model, synchronize_parameters
    from megatron.grpo.sharding import shard_parameter, whole_name

    preset, dtype = get_preset(args.model_preset), DTYPES[args.dtype]
    seed_model_parallel(args.seed)
    wide_router = {"moe_router_dtype": "fp64"} if preset.has_experts else {}
    plain_config = preset.transformer_config(use_cpu_initialization=True, **wide_router)
    plain = build_conventional_model(preset, plain_config, single_rank_groups(groups), flash=False)
    config = preset.transformer_config(
        use_cpu_initialization=True, tensor_model_parallel_size=groups.tp.size(),
        context_parallel_size=groups.cp.size(), expert_model_parallel_size=groups.ep.size(),
        sequence_parallel=args.sequence_parallel, params_dtype=torch.float32,
        **(wide_router if dtype is torch.float64 else {}),
    )
    model = build_model(preset, config, groups)
    device = current_device()
    plain, model = plain.double(), model.to(device=device, dtype=dtype)
    perturb_weights(plain, args.seed)
    synchronize_parameters(plain, dist.group.WORLD)  # Megatron seeds its initialisation by TP rank
    whole = dict(plain.named_parameters())
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(parameter.to(dtype))  # the reference has exactly the engine's weights
        for name, parameter in model.named_parameters():
            source = whole[whole_name(name, preset.num_experts, groups.ep.rank(), groups.ep.size())]
            parameter.copy_(shard_parameter(name, source, preset, groups.tp.rank(), groups.tp.size()))
        biases = dict(plain.named_buffers())
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(biases[name])
    return plain.to(device), model


def compare(reference: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> dict:
    """Relative error and cosine per parameter, and over all of them together."""
    parameters, squares = {}, torch.zeros(4, dtype=torch.float64)
    for name, r in reference.items():
        r, f = r.double().flatten(), found[name].flatten()
        norm, error, dot = r.norm(), (r - f).norm(), (r @ f)
        relative = (error / norm).item() if norm > 0 else float(error > 0)
        cosine = (dot / (norm * f.norm())).item() if norm > 0 and f.norm() > 0 else float(norm == f.norm())
        parameters[name] = {"relative_error": relative, "cosine": cosine}
        squares += torch.stack([error**2, norm**2, dot, f.norm() ** 2]).cpu()
    error, norm, dot, found_norm = squares.tolist()
    return {
        "max_relative_error": max(p["relative_error"] for p in parameters.values()),
        "global_relative_error": (error / norm) ** 0.5,
        "cosine": dot / (norm * found_norm) ** 0.5 if found_norm else 0.0,
        "parameters": parameters,
    }


def measure(args) -> dict | None:
    """The audit on the ranks of this job: the report on rank 0, None elsewhere."""
    from longstraw.patches.float64 import lift_float64
    from longstraw.patches.process_groups import initialize_groups
    from megatron.grpo.quiet_logs import quiet_logs

    quiet_logs()
    groups = initialize_groups(
        tensor_parallel=args.tensor_model_parallel_size, context_parallel=args.context_parallel_size,
        expert_parallel=args.expert_model_parallel_size,
    )
    vocab_size = get_preset(args.model_preset).vocab_size
    tokens = draw_tokens(args, vocab_size)
    with lift_float64():
        plain, model = build_pair(args, groups)
        loss, found = engine_gradients(args, model, groups, vocab_size, *tokens)
        if dist.get_rank() != 0:
            return None
        device = next(plain.parameters()).device
        prompt, responses, weights = tokens
        reference_loss, reference = dense_gradients(
            plain, prompt.to(device), [r.to(device) for r in responses], [w.to(device) for w in weights]
        )
    report = {"semantics": args.semantics, "loss": loss, "reference_loss": reference_loss}
    report |= compare(reference, found)
    return report | {"settings": {key: value for key, value in vars(args).items() if key != "json"}}


def main() -> int:
    """Launch the ranks, or be one."""
    args = parse_arguments()
    if not is_rank():
        ranks = args.context_parallel_size * args.tensor_model_parallel_size
        return run_ranks(str(Path(__file__).resolve()), sys.argv[1:], ranks)
    report = measure(args)
    if report is not None:
        write_report(report, args.json)
        if args.json != "-":
            print(f"global relative error {report['global_relative_error']:.3e}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
