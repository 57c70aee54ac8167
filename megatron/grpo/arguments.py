"""The command line: our flags in front, Megatron's behind them, and one frozen record of ours at the end.

    args, config = parse_arguments(argv)

`args` is Megatron's namespace after its own `validate_args`; `config` is a TrainConfig. Each config dataclass is a group
of flags, made by Megatron's ArgumentGroupFactory: the field's docstring is the help. `--model-preset` sets the defaults
of Megatron's model flags, so an explicit flag wins. What cannot be run is refused before anything heavy happens, all of
it at once, a sentence each (`megatron.grpo.flag_policy`).

Left out: YAML, and Megatron's flags that this program does not read; --help lists those that it does.
"""

import argparse
import contextlib
import copy
import functools
import importlib.util
import io
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from megatron.core.msc_utils import MultiStorageClientFeature
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER
from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.arguments import add_megatron_arguments, validate_args

from longstraw.patches.device import cuda_available
from longstraw.patches.verify import require_megatron_version
from megatron.grpo.flag_policy import OPTIMIZERS, TAKEN, WORKING_VALUES, check_values, refuse_flags, show_value
from megatron.grpo.flag_ranges import find_bad_numbers
from megatron.grpo.idle_flags import find_idle_flags
from megatron.grpo.model_provider import check_divisible, pad_vocab_size
from megatron.grpo.presets import ModelPreset, get_preset
from megatron.grpo.presets.sizes import find_bad_sizes
from megatron.grpo.run_config import CONFIG_GROUPS, TrainConfig

_USAGE = """torchrun --nproc-per-node RANKS -m megatron.grpo.train
           --model-preset NAME --prompt-data PATH --tokenizer-path PATH --train-iters STEPS [flags]"""
_DESCRIPTION = """GRPO with the exact gradient on very long shared prompts. This program's flags come first; below them
are those of Megatron-LM that it reads, with Megatron's own help. Any other flag of Megatron-LM is refused."""


_NOT_GIVEN = object()


class ArgumentErrors(ValueError):
    """Everything that is wrong with a command line.

    `sentences` holds one sentence for each; str() joins them by newlines.
    """

    def __init__(self, sentences: Sequence[str]):
        super().__init__("\n".join(sentences))
        self.sentences = list(sentences)


class _Parser(argparse.ArgumentParser):
    """A parser that raises instead of exiting, so that both kinds of refusal end alike."""

    def error(self, message: str):
        raise ArgumentErrors([message])

    def print_help(self, file=None):
        if int(os.environ.get("RANK", 0)) == 0:
            super().print_help(file)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Says the default where there is one, and not for switches, whose default is to be left out."""

    def _get_help_string(self, action):
        if action.default is None or action.nargs == 0:
            return action.help
        return super()._get_help_string(action)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a command line is checked against.

    cuda: whether a CUDA device is there. fused_adam: whether Megatron's Adam is Transformer Engine's or Apex's.
    world_size: number of ranks.
    """

    cuda: bool
    fused_adam: bool
    world_size: int

    @classmethod
    def here(cls) -> "Machine":
        """This machine, and the ranks that torchrun has started."""
        return cls(
            cuda=cuda_available(), fused_adam=not USING_PYTORCH_OPTIMIZER,
            world_size=int(os.environ.get("WORLD_SIZE", 1)),
        )


@functools.cache
def build_parser(model_preset: str | None = None, *, cuda: bool | None = None) -> argparse.ArgumentParser:
    """The whole parser: our groups, then Megatron's. model_preset sets the defaults of Megatron's model flags.

    cuda: whether a CUDA device is there; by default whether one is.
    Raises ValueError when the preset is not known.
    """
    require_megatron_version()
    parser = _Parser(
        prog="train.py", usage=_USAGE, description=_DESCRIPTION, allow_abbrev=False, formatter_class=_HelpFormatter,
    )
    added: set[str] = set()
    for config_class, title in CONFIG_GROUPS.values():
        # A field that two records share is one flag; TrainConfig checks that they agree.
        ArgumentGroupFactory(config_class, exclude=sorted(added)).build_group(parser, title=title)
        added |= {field.name for field in fields(config_class)}
    ours = set(parser._actions)
    add_megatron_arguments(parser)
    _hide_help(parser, ours)
    for action in parser._actions:
        if action.dest in ("linear_attention_freq", "moe_layer_freq"):
            action.type = functools.partial(_read_pattern, action.type)
        if action.dest == "optimizer":
            action.choices = [*action.choices, *(name for name in OPTIMIZERS if name not in action.choices)]
            action.help = "adam, or logra: updates of projection matrices from gradient sketches (its flags are above)"
    defaults = dict(WORKING_VALUES)
    if not (cuda_available() if cuda is None else cuda):
        # Weights drawn on the CPU are drawn whole and then cut, so they do not depend on the tensor-parallel size.
        defaults |= {"distributed_backend": "gloo", "use_cpu_initialization": True}
    if model_preset is not None:
        defaults |= get_preset(model_preset).megatron_arguments()
    parser.set_defaults(**defaults)
    return parser


def _read_pattern(convert, text):
    """Megatron's layer patterns are evaluated as Python, which raises more than argparse catches."""
    try:
        return convert(text)
    except (SyntaxError, ArithmeticError, LookupError, MemoryError, ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text} is neither a number nor a list of 0 and 1 for each layer") from error


def _hide_help(parser: argparse.ArgumentParser, ours: set) -> None:
    """Leave out of --help the Megatron flags that would be refused, and the groups that have no other."""
    for group in parser._action_groups:
        shown = False
        for action in group._group_actions:
            if action not in ours and action.dest not in TAKEN and action.dest != "help":
                action.help = argparse.SUPPRESS
            shown |= action.help is not argparse.SUPPRESS
        if not shown:
            group.description = None


def _explicit_flags(parser: argparse.ArgumentParser, argv: Sequence[str], working: dict) -> dict[str, object]:
    """Destination -> value of the flags that are on the command line: argparse leaves what is set already alone."""
    namespace = parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(working, _NOT_GIVEN)))
    return {name: value for name, value in vars(namespace).items() if value is not _NOT_GIVEN}


def _spelling(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, str]:
    """Destination -> the flag as typed, or its first spelling."""
    spelling = {action.dest: action.option_strings[0] for action in parser._actions if action.option_strings}
    for word in argv:
        flag = word.split("=")[0]
        if flag in parser._option_string_actions:
            spelling[parser._option_string_actions[flag].dest] = flag
    return spelling


def _find_preset(argv: Sequence[str]) -> str | None:
    """The value of --model-preset, needed before the other defaults are known."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--model-preset")
    try:
        return first.parse_known_args(argv)[0].model_preset
    except argparse.ArgumentError as error:
        raise ArgumentErrors([str(error)]) from error


def build_configs(args: argparse.Namespace) -> tuple[TrainConfig | None, list[str]]:
    """The frozen records from the namespace, and one sentence for each group that refuses its values."""
    records, found = {}, []
    for name, (config_class, _) in CONFIG_GROUPS.items():
        try:
            records[name] = config_class(**{field.name: getattr(args, field.name) for field in fields(config_class)})
        except ValueError as error:
            found.append(str(error))
    if found:
        return None, found
    try:
        return TrainConfig(**records), []
    except ValueError as error:
        return None, [str(error)]


def resolve_preset(args: argparse.Namespace) -> ModelPreset:
    """The preset of --model-preset with the explicit model flags applied: what the model is built from."""
    preset = get_preset(args.model_preset)
    changed = {name: getattr(args, name) for name in preset.model_fields() if hasattr(preset, name)}
    return replace(
        preset, **changed, vocab_size=args.vocab_size, max_position_embeddings=args.max_position_embeddings,
        rotary_base=args.rotary_base, rotary_percent=args.rotary_percent, layernorm_epsilon=args.layernorm_epsilon,
        zero_centered_norm=args.layernorm_zero_centered_gamma, qkv_bias=args.add_qkv_bias,
        tied_embeddings=not args.untie_embeddings_and_output_weights, num_experts=args.num_experts,
    )


def parse_arguments(
    argv: Sequence[str] | None = None, machine: Machine | None = None
) -> tuple[argparse.Namespace, TrainConfig]:
    """Parse, check and complete a command line (default: sys.argv), on every rank alike.

    machine: where it is to run; by default here.

    Returns:
        Megatron's namespace, validated by Megatron, and our record. `args.output_dir` is the output folder itself.

    Raises:
        ArgumentErrors: (a ValueError) every flag that cannot be run, one sentence each. Nothing has started then.
    """
    argv, machine = list(sys.argv[1:] if argv is None else argv), machine or Machine.here()
    preset_name = _find_preset(argv)
    try:
        parser = build_parser(preset_name, cuda=machine.cuda)
    except ValueError as error:
        raise ArgumentErrors([str(error)]) from error
    working = vars(parser.parse_args([]))
    explicit = _explicit_flags(parser, argv, working)
    spelling = _spelling(parser, argv)
    bad_numbers = find_bad_numbers(explicit, spelling)
    # What else is wrong is found with the working values in place of bad numbers: nothing is said of one twice.
    good = {name: value for name, value in explicit.items() if name not in bad_numbers}
    args = argparse.Namespace(**copy.deepcopy(working) | good)
    ours = {field.name for config_class, _ in CONFIG_GROUPS.values() for field in fields(config_class)}
    refused = refuse_flags(good, working, spelling, ours) + list(bad_numbers.values())
    config, found = build_configs(args)
    refused += found
    if preset_name is None:
        raise ArgumentErrors(refused)
    if args.rollout_only:
        refused += [] if machine.world_size == 1 else [f"--rollout-only is one process, not {machine.world_size} ranks"]
        machine = replace(machine, world_size=_fitting_ranks(args))
    args.rank, args.world_size = int(os.environ.get("RANK", 0)), machine.world_size
    args.local_rank = int(os.environ.get("LOCAL_RANK", args.local_rank))
    args.group_query_attention = args.num_query_groups != args.num_attention_heads
    refused += _check(args, machine)
    show = {name: spelling[name] + show_value(value) for name, value in good.items() if name in TAKEN.union(ours)}
    refused += find_idle_flags(argparse.Namespace(**vars(args) | explicit), get_preset(preset_name), show)
    if refused:
        raise ArgumentErrors(refused)
    _complete(args, config)
    _validate_with_megatron(args)
    return args, config


def _fitting_ranks(args: argparse.Namespace) -> int:
    """Ranks that the parallel sizes fit: --rollout-only takes the trainer's flags, whose ranks are not there."""
    sizes = args.context_parallel_size, args.expert_model_parallel_size
    return args.tensor_model_parallel_size * math.lcm(*sizes) if min(sizes) > 0 else 1


def _check(args: argparse.Namespace, machine: Machine) -> list[str]:
    """What the values refuse, given the machine and the model."""
    preset = resolve_preset(args)
    found = check_values(
        args, preset, cuda=machine.cuda, fused_adam=machine.fused_adam, world_size=machine.world_size
    )
    bad_sizes = find_bad_sizes(preset)
    found += bad_sizes
    if not bad_sizes and not any("parallel-size" in sentence for sentence in found):
        try:
            check_divisible(preset, args)
        except ValueError as error:
            found.append(str(error))
    if _pad_vocab_size(args) % args.tensor_model_parallel_size:
        found.append(
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size} does not divide the padded vocabulary of "
            f"{_pad_vocab_size(args)} rows: set --make-vocab-size-divisible-by to a multiple of it"
        )
    longest = (args.prompt_length_limit or 0) + args.max_response_length
    if longest > args.max_position_embeddings:
        limit = f"--prompt-length-limit {args.prompt_length_limit} and " if args.prompt_length_limit else ""
        found.append(
            f"{limit}--max-response-length {args.max_response_length} exceed --max-position-embeddings "
            f"{args.max_position_embeddings}"
        )
    if args.live_chunks > 0 and args.expert_model_parallel_size > args.context_parallel_size:
        found.append(
            f"--live-chunks {args.live_chunks}: replicas that share experts (--expert-model-parallel-size "
            f"{args.expert_model_parallel_size} above --context-parallel-size {args.context_parallel_size}) run in step, backward by "
            "backward, and none can keep a graph for later"
        )
    if args.wandb_project and args.wandb_exp_name and importlib.util.find_spec("wandb") is None:
        found.append("--wandb-project needs the wandb package: pip install wandb")
    return found


def _pad_vocab_size(args: argparse.Namespace) -> int:
    """Rows of the embedding: Megatron's padding without the factor TP, so that a checkpoint fits every TP size."""
    return pad_vocab_size(args.vocab_size, args.make_vocab_size_divisible_by, 1)


def _complete(args: argparse.Namespace, config: TrainConfig) -> None:
    """Fill in what follows from the rest, and what Megatron asks for without using it here."""
    args.output_dir = config.run.output_folder
    args.tensorboard_dir = args.tensorboard_dir or os.path.join(args.output_dir, "tensorboard")
    args.wandb_save_dir = args.wandb_save_dir or os.path.join(args.output_dir, "wandb")
    if args.save and args.save_interval is None:
        args.save_interval = args.train_iters  # at the end; Megatron insists on an interval
    if args.bf16:
        args.accumulate_allreduce_grads_in_fp32 = True
    args.padded_vocab_size = _pad_vocab_size(args)
    # Megatron wants a sequence length that it could cut over context parallelism; the engine reads none.
    unit = 2 * args.context_parallel_size
    args.seq_length = max(unit, args.max_position_embeddings // unit * unit)
    args._is_global_batch_size_explicitly_specified = False
    args.enable_msc = False
    MultiStorageClientFeature.disable()
    if not cuda_available() or not torch.cuda.is_initialized():
        # Kernels must be issued in one order under context and tensor parallelism; the driver reads this on start.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _validate_with_megatron(args: argparse.Namespace) -> None:
    """Megatron's own checks and derived values, without its listing of all 800 arguments."""
    with contextlib.redirect_stdout(io.StringIO()), _no_device_properties(args.rollout_only):
        try:
            validate_args(args)
        except (AssertionError, ValueError, RuntimeError) as error:
            raise ArgumentErrors([f"Megatron-LM refuses these flags: {error}"]) from error


@contextlib.contextmanager
def _no_device_properties(leave_device: bool):
    """validate_args asks for the GPU generation as soon as there is parallelism; without a GPU any answer will do.

    leave_device: also where there is one, since asking would take some of its memory.
    """
    if cuda_available() and not leave_device:
        yield
        return
    original = torch.cuda.get_device_properties
    torch.cuda.get_device_properties = lambda device=None: argparse.Namespace(major=9)
    try:
        yield
    finally:
        torch.cuda.get_device_properties = original


def parse_command_line(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, TrainConfig]:
    """`parse_arguments` for a program's start: what is refused is printed by rank 0, and the exit status is 2."""
    try:
        return parse_arguments(argv)
    except ArgumentErrors as errors:
        if int(os.environ.get("RANK", 0)) == 0:
            lines = "".join(f"train: error: {sentence}\n" for sentence in errors.sentences)
            print(f"usage: {_USAGE}\n{lines}train: --help lists every flag", file=sys.stderr)
        sys.exit(2)
