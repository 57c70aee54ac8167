"""Gradient and optimizer bytes of dense Adam, LoRA and LoGRA on one model, and the peak of each phase of their steps.

    python benchmarks/optimizer_memory.py --model-preset tiny-qwen3.6 --logra-rank 16 --lora-rank 16 --json -

Measured: the training program's own model, DDP, optimizer and replay take two steps on one rank; every tensor storage
that they made and that is still alive after a step counts (`longstraw.memory_meter`). `counted` is what the weight update
says of itself, and `unaccounted_bytes` the difference. `matrices` are the projection matrices, those that LoGRA sketches;
`rest` all other weights, which LoRA and LoGRA freeze. A phase's peak is of storages above what stays between steps:

    accumulate    the replay            reduce    sums over ranks, and the check for NaN
    prepare       direction and norms   probe     predicted and measured KL       apply    the weights move
    commit        (Adam, LoRA) all after the replay

Beside them large models by shape (`benchmarks/optimizer_shapes.py`): bfloat16 weights, bytes of rank 0 under a layout.
Each optimizer, and each of these models, is a process of its own. Exit code 0 means that all were measured; one that
was not has an `error`. It never judges.
"""

import argparse
import gc
import json
import multiprocessing
import os
import sys
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.live_step import LiveStep, open_model, open_update  # noqa: E402
from benchmarks.optimizer_shapes import (  # noqa: E402
    Layout, build_shapes, count_adam, count_logra, count_lora, read_shapes,
)
from longstraw.memory_meter import StorageMeter  # noqa: E402
from longstraw.patches.projections import find_projections  # noqa: E402
from longstraw.patches.world_sizes import find_misfits  # noqa: E402
from megatron.grpo.logra_update import LograUpdate  # noqa: E402
from megatron.grpo.optimizer import optimizer_state  # noqa: E402
from megatron.grpo.presets import check_divisible, get_preset  # noqa: E402
from megatron.grpo.quiet_logs import quiet_logs  # noqa: E402
from tools.tool_flags import check_at_least_1, check_report_path, check_seed  # noqa: E402
from tools.tool_reports import write_report  # noqa: E402

OPTIMIZERS = ("adam", "lora", "logra")
PUBLISHED_LAYOUTS = {
    "qwen3.6-27b": Layout(context_parallel=8), "glm-5.2": Layout(context_parallel=32, expert_parallel=32),
}
REFERENCE_RANK = 256
"""LoGRA's rank in arXiv 2610.06647."""

PHASES = {"reduce": "reduce", "find_nonfinite": "reduce", "prepare": "prepare", "apply": "apply"}
"""Methods of LoGRA -> the phase that they are."""

PROBES = ("open", "measure_rate", "measure_kl")
_SIZES = ("tensor_model_parallel_size", "context_parallel_size", "data_parallel_size", "expert_model_parallel_size")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The benchmark's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model-preset", default="tiny-qwen3.6", help="the model that is measured; see megatron/grpo/presets/")
    add("--logra-rank", type=int, default=16, help="rank of the sketches")
    add("--lora-rank", type=int, default=16, help="rank of the pairs")
    add("--bf16", action="store_true", help="bfloat16 weights; else float32")
    add("--optimizers", nargs="*", choices=OPTIMIZERS, default=list(OPTIMIZERS), help="which are measured")
    add("--prompt-length", type=int, default=256, help="tokens of the prompt")
    add("--response-length", type=int, default=32, help="tokens of each response")
    add("--group-size", type=int, default=4, help="responses")
    add("--chunk-size", type=int, default=64, help="tokens of the prompt per chunk")
    add("--shapes", nargs="*", default=list(PUBLISHED_LAYOUTS), help="models that are counted by shape, perhaps none")
    for name in _SIZES:
        add(f"--{name.replace('_', '-')}", type=int, help="of the models by shape; default: of their published runs")
    add("--seed", type=int, default=1, help="of weights and tokens")
    add("--json", default="-", metavar="PATH", help="where the report goes; - is standard output")
    args = parser.parse_args(argv)
    check_at_least_1(
        parser, args, ("logra_rank", "lora_rank", "prompt_length", "response_length", "group_size", "chunk_size")
    )
    check_at_least_1(parser, args, [name for name in _SIZES if getattr(args, name) is not None])
    check_seed(parser, args.seed)
    check_report_path(parser, args.json)
    if args.group_size < 2 or args.prompt_length < 2:
        parser.error("--group-size and --prompt-length are at least 2: responses are compared, and follow a prompt")
    for name in (args.model_preset, *args.shapes):
        try:
            check_layout(name, layout_of(args, name) if name in args.shapes else Layout())
        except ValueError as unfit:
            parser.error(str(unfit))
    return args


def layout_of(args: argparse.Namespace, name: str) -> Layout:
    """The published layout of a model, where flags say nothing else."""
    known = PUBLISHED_LAYOUTS.get(name, Layout())
    fields = ("tensor_parallel", "context_parallel", "data_parallel", "expert_parallel")
    return Layout(**{
        field: getattr(known, field) if getattr(args, flag) is None else getattr(args, flag)
        for field, flag in zip(fields, _SIZES)
    })  # fmt: skip


def check_layout(name: str, layout: Layout) -> None:
    """Raise ValueError where a model is not known or cannot be cut so."""
    tp, cp, ep = layout.tensor_parallel, layout.context_parallel, layout.expert_parallel
    sizes = argparse.Namespace(tensor_model_parallel_size=tp, context_parallel_size=cp, expert_model_parallel_size=ep)
    check_divisible(get_preset(name), sizes)
    for misfit in find_misfits(layout.ranks, tensor_parallel=tp, context_parallel=cp, expert_parallel=ep):
        raise ValueError(misfit)


# --- Measured --------------------------------------------------------------------------------------------------------


class PhasePeaks:
    """Peaks of a meter's live bytes by phase, above `floor`. A phase that runs several times has its largest."""

    def __init__(self, meter: StorageMeter, floor: int):
        self.meter, self.floor, self.peaks = meter, floor, {}

    @contextmanager
    def phase(self, name: str):
        """What runs inside belongs to the phase."""
        self.meter.peak_bytes = self.meter.live_bytes
        yield
        self.peaks[name] = max(self.peaks.get(name, 0), self.meter.peak_bytes - self.floor)

    def watch(self, owner: object, method: str, name: str) -> None:
        """Every call of an object's method is of the phase from now on."""
        original = getattr(owner, method)

        def watched(*args, **kwargs):
            with self.phase(name):
                return original(*args, **kwargs)

        setattr(owner, method, watched)


def flags_of(args: argparse.Namespace, optimizer: str) -> str:
    """The training program's flags for one of the optimizers."""
    preset = get_preset(args.model_preset)
    flags = (
        f"--model-preset {args.model_preset} --group-size {args.group_size} --prompt-chunk-size {args.chunk_size} "
        f"--max-response-length {args.response_length}{' --bf16' if args.bf16 else ''}"
    )
    if optimizer == "lora":
        return f"{flags} --lora-rank {args.lora_rank}"
    if optimizer == "logra":
        # Forward mode goes through neither, and bfloat16 logits move by less than their rounding.
        differences = preset.has_experts or preset.multi_latent_attention or args.bf16
        return f"{flags} --optimizer logra --logra-rank {args.logra_rank}" + (
            " --kl-probe finite-difference" if differences else ""
        )
    return flags


def measure(args: argparse.Namespace, optimizer: str) -> dict:
    """One optimizer's figures, in this process."""
    quiet_logs()
    opened = open_model(flags_of(args, optimizer), seed=args.seed)
    shapes = read_shapes(opened.model)
    gc.collect()
    with StorageMeter() as meter:
        live = open_update(opened)
        run_step(live, args, 1)
        standing = meter.live_bytes
        phases = PhasePeaks(meter, standing)
        watch_phases(phases, live)
        run_step(live, args, 2)
        leaked = meter.live_bytes - standing
    counted = live.update.count_bytes()
    matrices = count_on_matrices(live, counted)
    weights = sum(parameter.nbytes for parameter in opened.model.parameters())
    drawn = live.update.logra.state_bytes()["projections"] if isinstance(live.update, LograUpdate) else 0
    return {
        "weight_bytes": weights, "matrix_parameters": shapes.numel - shapes.rest, "rest_parameters": shapes.rest,
        "live_bytes": standing, "counted": counted, "unaccounted_bytes": standing - sum(counted.values()),
        "matrices_bytes": matrices, "rest_bytes": sum(counted.values()) - matrices, "leaked_in_a_step": leaked,
        "phase_peak_bytes": phases.peaks,
        "projection_bytes": drawn,  # among the counted gradients: the words of A that are drawn now
    }


def run_step(live: LiveStep, args: argparse.Namespace, number: int) -> None:
    """A whole step; nothing of it is left but what the optimizer keeps."""
    group = live.sample_group(prompt_length=args.prompt_length, seed=args.seed + number)
    live.accumulate(number, group)
    live.take(number, group)
    del group
    gc.collect()


def watch_phases(phases: PhasePeaks, live: LiveStep) -> None:
    """Take the peaks of the phases of the steps from now on."""
    phases.watch(live, "accumulate", "accumulate")
    if not isinstance(live.update, LograUpdate):
        phases.watch(live, "take", "commit")
        return
    for method, name in PHASES.items():
        phases.watch(live.update.logra, method, name)
    for method in PROBES:
        phases.watch(live.update.probe, method, "probe")


def count_on_matrices(live: LiveStep, counted: dict[str, int]) -> int:
    """What of the counted bytes belongs to projection matrices, or to the pairs that stand for their updates: all but
    what Adam keeps for trained weights outside of them."""
    model, total = live.opened.model, sum(counted.values())
    own = {id(parameter) for matrix in find_projections(model) for parameter in matrix.module.parameters(recurse=False)}
    for parameter in model.parameters():
        if parameter.requires_grad and id(parameter) not in own:
            weight = getattr(parameter, "main_param", parameter)
            held = [value for value in optimizer_state(live.optimizer)[weight].values() if torch.is_tensor(value)]
            held += [parameter.main_grad] + ([] if weight is parameter else [weight])
            total -= sum(tensor.nbytes for tensor in held)
    return total


# --- By shape --------------------------------------------------------------------------------------------------------


def count_by_shape(args: argparse.Namespace, name: str) -> dict:
    """A large model's figures on rank 0 of its layout."""
    quiet_logs()
    layout = layout_of(args, name)
    shapes = build_shapes(get_preset(name), layout)
    found = {
        "adam": count_adam(shapes, layout), "adam, distributed optimizer": count_adam(shapes, layout, shared_out=True),
        f"lora, rank {args.lora_rank}": count_lora(shapes, args.lora_rank),
    }
    for rank in sorted({args.logra_rank, REFERENCE_RANK}):
        for masters in ("remainder", "float32"):
            found[f"logra, rank {rank}, masters {masters}"] = count_logra(shapes, layout, rank, masters=masters)
    return {
        "layout": vars(layout) | {"ranks": layout.ranks}, "matrices": len(shapes.matrices),
        "matrix_parameters": shapes.numel - shapes.rest, "rest_parameters": shapes.rest,
        "weight_bytes": 2 * shapes.numel, "bytes": found,
    }


# --- Processes -------------------------------------------------------------------------------------------------------


def run_apart(function, *arguments) -> dict:
    """`function(*arguments)` in a process of its own; `error` where it did not come to an end."""
    # A fork has the imports already; but no fork can use a CUDA device that its parent has asked for.
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    receiver, sender = context.Pipe(duplex=False)
    sys.stdout.flush()
    process = context.Process(target=_send, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        return {"error": f"ended with exit code {process.exitcode}; see standard error"}
    finally:
        process.join()


def _send(sender, function, arguments) -> None:
    os.dup2(2, 1)  # standard output is the report's
    sender.send(function(*arguments))
    sender.close()


def compare(measured: dict[str, dict]) -> dict[str, float]:
    """Bytes on projection matrices, and of all, of the others over LoGRA's."""
    found, logra = {}, measured.get("logra", {})
    for name, figures in measured.items():
        if name != "logra" and "live_bytes" in figures and "live_bytes" in logra:
            found[f"{name}_over_logra_on_matrices"] = figures["matrices_bytes"] / logra["matrices_bytes"]
            found[f"{name}_over_logra"] = figures["live_bytes"] / logra["live_bytes"]
    return found


def main(argv: list[str] | None = None) -> int:
    """The command line program; returns the exit code."""
    args = parse_arguments(argv)
    measured = {name: run_apart(measure, args, name) for name in args.optimizers}
    shapes = {name: run_apart(count_by_shape, args, name) for name in args.shapes}
    settings = {key: value for key, value in vars(args).items() if key != "json"}
    report = {"settings": settings, "measured": measured, "ratios": compare(measured), "by_shape": shapes}
    write_report(report, args.json)
    return int(any("error" in figures for figures in (*measured.values(), *shapes.values())))


if __name__ == "__main__":
    sys.exit(main())
