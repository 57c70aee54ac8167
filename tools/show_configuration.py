"""What a training command line resolves to, without starting it: on this machine, for another one's ranks and GPUs.

    tools/show_configuration.py --ranks 32 --model-preset glm-5.2 --context-parallel-size 32 ... (flags of the program)

Prints every setting of the training program's own groups, the model, and how the ranks are cut into groups; what cannot
be run is refused in the same sentences as at the start of a run. Exit codes: 0, or 2 where flags are refused.

Left out: files (data, tokenizer, checkpoints are not looked at) and memory.
"""

import argparse
import sys
from dataclasses import asdict, fields

from rich.console import Console
from rich.table import Table

from megatron.grpo.arguments import ArgumentErrors, Machine, parse_arguments, resolve_preset
from megatron.grpo.run_config import CONFIG_GROUPS


def show_group(console: Console, title: str, values: dict[str, object]) -> None:
    """One group of settings as two columns."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    for name, value in values.items():
        table.add_row(name, "-" if value is None else str(value))
    console.print(title, style="bold", markup=False)
    console.print(table)


def cut_ranks(args: argparse.Namespace, ranks: int) -> dict[str, object]:
    """Sizes of the parallel groups; what is left over is data parallel."""
    tp, cp, ep = args.tensor_model_parallel_size, args.context_parallel_size, args.expert_model_parallel_size
    sizes = {
        "ranks": ranks, "tensor parallel": tp, "context parallel": cp, "data parallel": ranks // (tp * cp),
        "sequence parallel": args.sequence_parallel,
    }
    if args.num_experts:
        sizes |= {"expert parallel": ep, "experts a rank": args.num_experts // ep, "expert data parallel": ranks // (tp * ep)}
    return sizes


def main(argv: list[str] | None = None) -> int:
    """The command line program; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--ranks", type=int, default=1, help="ranks of the job, all nodes together")
    parser.add_argument("--cpu", action="store_true", help="the job's machines have no GPU (default: they have)")
    own, flags = parser.parse_known_args(argv)
    if own.ranks < 1:
        parser.error(f"--ranks must be at least 1, got {own.ranks}")
    machine = Machine(cuda=not own.cpu, fused_adam=not own.cpu, world_size=own.ranks)
    try:
        args, config = parse_arguments(flags, machine)
    except ArgumentErrors as errors:
        for sentence in errors.sentences:
            print(f"show_configuration: error: {sentence}", file=sys.stderr)
        return 2
    console = Console(width=110, highlight=False)
    show_group(console, "ranks", cut_ranks(args, own.ranks))
    model = {name: value for name, value in asdict(resolve_preset(args)).items() if value is not None}
    show_group(console, "model", model)
    for name, (config_class, title) in CONFIG_GROUPS.items():
        record = getattr(config, name)
        show_group(console, title, {field.name: getattr(record, field.name) for field in fields(config_class)})
    training = (
        "train_iters", "optimizer", "lr", "min_lr", "lr_decay_style", "weight_decay", "clip_grad", "bf16", "seed",
        "use_distributed_optimizer", "transformer_impl", "load", "pretrained_checkpoint", "save", "save_interval",
    )
    show_group(console, "training (Megatron's flags)", {name: getattr(args, name) for name in training})
    return 0


if __name__ == "__main__":
    sys.exit(main())
