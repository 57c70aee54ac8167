"""The dry run's own flags; all others are the training program's, with its refusals.

The data, the tokenizer and the outputs of a run are not looked at, so flags that name them may be missing or stay.
"""

import argparse
import os
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from longstraw.attention.layout import plan_blocks
from longstraw.dry_run.hardware import HARDWARE
from longstraw.dry_run.search import AXES, FitSettings, Limits
from longstraw.dry_run.sizes import read_size
from megatron.grpo.arguments import Machine, parse_arguments
from megatron.grpo.dry_run.parts import Lengths
from megatron.grpo.dry_run.run import RunSettings
from megatron.grpo.run_config import TrainConfig

_MISSING = {"--prompt-data": "none", "--tokenizer-path": "none", "--train-iters": "1"}
"""What the training program needs and a dry run does not, with something to give it."""


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """A parsed command line. argv: the training program's part of it, as it was parsed."""

    args: Namespace
    config: TrainConfig
    settings: RunSettings
    argv: tuple[str, ...]
    json: str | None
    measure: bool
    hardware: str
    fit: FitSettings | None = None
    receipt: str | None = None
    limits: Limits = Limits()


def build_parser(description: str) -> argparse.ArgumentParser:
    """The parser of the dry run's own flags."""
    parser = argparse.ArgumentParser(
        prog="dry_run", description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--ranks", type=int, help="ranks of the job (default: torchrun's, or tensor x context x data parallelism of 1)")
    add("--rank", type=int, help="whose step (default: the rank that owns most of a prompt)")
    add("--prompt-length", type=int, help="tokens of each prompt (default: --prompt-length-limit)")
    add("--response-length", type=int, help="tokens of each response (default: --max-response-length)")
    add("--machine", choices=("gpu", "cpu"), default="gpu", help="whose kernels the step is counted with (default: gpu)")
    add("--hardware", choices=tuple(HARDWARE), help="the GPU whose times are shown (the report has all of them; default: H200)")
    add("--every-block", action="store_true", help="run every block instead of those that the others repeat")
    add("--rollout-elsewhere", action="store_true", help="the responses come from an engine or a store: nothing is decoded here")
    add("--measure", action="store_true", help="run the step for real on this machine's ranks and report the same")
    add("--even-choices", action="store_true",
        help="of --measure: tokens go to experts in turn and selections have a dry run's widths, to be compared with one")
    add("--fit", choices=("peak", "prompt"), nargs="?", const="peak",
        help="search residencies, parallel sizes, chunk size and LoGRA rank, a dry run each, for the smallest peak (the default) "
             "or the longest prompt")
    add("--device-memory", metavar="SIZE",
        help="what a rank may hold on its device, such as 92GB (10^9 bytes each): says whether the step fits, or limits --fit")
    add("--host-memory", metavar="SIZE", help="the same of host memory, such as 192GB")
    add("--fit-over", choices=AXES, nargs="+", help=f"of --fit: what is searched (default: {', '.join(AXES)})")
    add("--fit-jobs", type=int, help="of --fit: dry runs at a time, of 1 to 2 GB each (default: one a core, at most 4)")
    add("--json", metavar="PATH", help="write the report there; - is standard output")
    add("--receipt", metavar="PATH", help="write a receipt there, to be compared with a run's (tools/compare_receipts.py)")
    return parser


def parse_dry_run(argv: Sequence[str], description: str = "") -> DryRun:
    """Parse and check a command line.

    Raises ArgumentErrors (a ValueError) for what the training program refuses, and ValueError for a flag of ours.
    """
    parser = build_parser(description)
    own, flags = parser.parse_known_args(list(argv))
    flags = [*flags, *(word for flag, value in _MISSING.items() if flag not in flags for word in (flag, value))]
    if own.json and own.json != "-":
        _check_writable("--json", own.json)
    if own.receipt:
        _check_writable("--receipt", own.receipt)
    if own.even_choices and not own.measure:
        raise ValueError("--even-choices is read only with --measure: a dry run's choices are always even")
    if own.hardware and (own.measure or own.machine == "cpu"):
        raise ValueError(f"--hardware {own.hardware}: {'--measure' if own.measure else '--machine cpu'} estimates no GPU's seconds")
    for name in ("ranks", "prompt_length", "response_length"):
        if getattr(own, name) is not None and getattr(own, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is at least 1, not {getattr(own, name)}")
    limits = _read_limits(own)
    fit = _read_fit(own, limits)
    ranks = own.ranks or int(os.environ.get("WORLD_SIZE", 0)) or _ranks_of_one_replica(flags)
    cuda = own.machine == "gpu" and not own.measure
    args, config = parse_arguments(flags, Machine(cuda=cuda, fused_adam=cuda, world_size=ranks))
    prompt, response = own.prompt_length or args.prompt_length_limit, own.response_length or args.max_response_length
    if not prompt:
        raise ValueError("--prompt-length is needed where --prompt-length-limit is not given")
    for name, length, flag in (
        ("--prompt-length", prompt, "--prompt-length-limit"), ("--response-length", response, "--max-response-length"),
    ):
        limit = getattr(args, flag.removeprefix("--").replace("-", "_"))
        if any(word.split("=")[0] == flag for word in flags) and length > limit:
            raise ValueError(f"{name} {length} is more than {flag} {limit}, which a run would not take")
    if prompt + response > args.max_position_embeddings:
        raise ValueError(
            f"--prompt-length {prompt} and --response-length {response} exceed --max-position-embeddings "
            f"{args.max_position_embeddings}"
        )
    rank = find_largest_rank(args, config, prompt) if own.rank is None else own.rank
    if not 0 <= rank < ranks:
        raise ValueError(f"--rank {rank} is none of {ranks} ranks")
    elsewhere = own.rollout_elsewhere or config.rollouts.rollout_engine != "resident" or bool(config.rollouts.rollouts_from)
    settings = RunSettings(
        ranks=ranks, rank=rank, lengths=Lengths(prompt=prompt, response=response), every_block=own.every_block or own.measure,
        decodes=not elsewhere, gpu=own.machine == "gpu", even_choices=own.even_choices,
    )
    return DryRun(
        args=args, config=config, settings=settings, argv=tuple(flags), json=own.json, measure=own.measure,
        hardware=own.hardware or "H200", fit=fit, receipt=own.receipt, limits=limits,
    )


def _check_writable(flag: str, path: str) -> None:
    """Raise ValueError where a file could not be written at a path."""
    file = Path(path)
    if file.is_dir() or flag == "--receipt" and path == "-":
        raise ValueError(f"{flag} {path} is no file: name one in a folder that exists")
    special = file.exists() and not file.is_file()
    if flag == "--receipt" and (special or file.is_symlink()):
        raise ValueError(f"{flag} {path} is a device, a pipe or a link, whose place a receipt would take: name a file")
    if special:
        return  # written to as it is
    try:
        tempfile.TemporaryFile(dir=file.resolve().parent).close()
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be written: {error.strerror} in {file.resolve().parent}") from error


def _read_limits(own: Namespace) -> Limits:
    """Raises ValueError for what is no size."""
    sizes = {}
    for name in ("device_memory", "host_memory"):
        try:
            sizes[name] = None if getattr(own, name) is None else read_size(getattr(own, name))
        except ValueError as error:
            raise ValueError(f"--{name.replace('_', '-')}: {error}") from error
    return Limits(device=sizes["device_memory"], host=sizes["host_memory"])


def _read_fit(own: Namespace, limits: Limits) -> FitSettings | None:
    """Raises ValueError for flags that --fit needs, or that need it."""
    if own.fit is None:
        for name in ("fit_over", "fit_jobs"):
            if getattr(own, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} is read only with --fit")
        return None
    for name, given in (
        ("--measure", own.measure), ("--rank", own.rank is not None), ("--receipt", own.receipt is not None)
    ):
        if given:
            raise ValueError(f"{name} is of one step, and --fit tries many: use one of them")
    if own.fit == "prompt" and limits.device is None:
        raise ValueError("--fit prompt needs --device-memory: without it every prompt fits")
    jobs = min(4, os.cpu_count() or 1) if own.fit_jobs is None else own.fit_jobs
    if jobs < 1:
        raise ValueError(f"--fit-jobs is at least 1, not {jobs}")
    over = tuple(axis for axis in AXES if axis in (own.fit_over or AXES))
    return FitSettings(goal=own.fit, limits=limits, over=over, jobs=jobs)


def _ranks_of_one_replica(flags: Sequence[str]) -> int:
    """Tensor x context parallel ranks, or as many as the experts are spread over."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("tensor-model", "context", "expert-model"):
        first.add_argument(f"--{name}-parallel-size", type=int, default=1)
    sizes, _ = first.parse_known_args(list(flags))
    replica = sizes.tensor_model_parallel_size * sizes.context_parallel_size
    return max(replica, sizes.tensor_model_parallel_size * sizes.expert_model_parallel_size)


def find_largest_rank(args: Namespace, config: TrainConfig, prompt: int) -> int:
    """The first rank that owns as many tokens of a prompt as any does."""
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    unit = tp if args.sequence_parallel else 1
    plan = plan_blocks(0, prompt - 1, config.sweeps.prompt_chunk_size, cp, 0, unit, None)
    owned = [sum(layout.tokens_of(rank) for layout in plan) for rank in range(cp)]
    return owned.index(max(owned)) * tp
