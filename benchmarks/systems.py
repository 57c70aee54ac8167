"""The systems that are compared, each as GRPO steps on given batches.

    exact                        LongStraw with the exact gradient
    exact_live                   the same with the graphs of all the prompt's chunks kept (--live-chunks): no recomputation
    response_only                LongStraw with the prompt state as a constant: not the same gradient
    conventional                 full-sequence autograd on Megatron's modules, a sequence of prompt + response per response
    checkpointed                 the same with recomputation of every layer
    trl, trl_checkpointed        TRL's GRPOTrainer, without and with (its default) recomputation
    prefix_grouper, prefix_grouper_checkpointed    PrefixGrouper on transformers' model, the same two ways

All have equal weights (those of the seed, exported for transformers by the project's own conversion), equal tokens and
advantages, the same objective and AdamW or Adam of torch; gradients are dropped after each step and made anew in all.

Left out: context parallelism (`benchmarks/step.py`), rollouts.
"""

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.points import PREFIX_GROUPER, SYSTEMS, TRL
from benchmarks.step import build_update, parse_arguments
from benchmarks.transformers_model import export_model
from benchmarks.updates import Batch, draw_batch
from megatron.grpo.presets import get_preset

WARM_UP_TOKENS = 256
"""Prompt of the step that makes moments and thread pools before anything is measured."""


EVERY_CHUNK = 10**6
"""More than any prompt here has."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The model, and how LongStraw cuts it. Responses of 128 tokens replayed 8 at a time are a graph of one chunk's size."""

    model_preset: str = "tiny-llama"
    chunk_size: int = 1024
    block_size: int = 1024
    responses_per_replay: int = 8
    learning_rate: float = 1e-6
    seed: int = 1
    threads: int = 1


Around = Callable[[int], AbstractContextManager]
"""Step number from 0 -> what each step runs inside."""


def draw_centred(setup: Setup, prompt_length: int, response_length: int, group_size: int) -> Batch:
    """The batch of a measurement, equal in every process. Advantages have mean 0, as TRL's have."""
    vocab_size = get_preset(setup.model_preset).vocab_size
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = draw_batch(prompt_length, response_length, group_size, vocab_size, setup.seed, device)
    return replace(batch, advantages=batch.advantages - batch.advantages.mean())


def with_warm_up(batch: Batch, steps: int) -> list[Batch]:
    """A step on a short prompt, then `steps` times the batch."""
    short = batch.cut(min(batch.prompt.shape[1], WARM_UP_TOKENS), len(batch.responses))
    return [short, *[batch] * steps]


def run_steps(
    system: str, setup: Setup, folder: Path, batches: list[Batch], around: Around, *, see_gradient=None
) -> None:
    """Take a GRPO step on each batch, inside `around(number)`.

    folder: of the exported weights, which TRL and PrefixGrouper load. see_gradient: called with the model when a step's
    gradient is complete. Raises ValueError for an unknown system.
    """
    if system not in SYSTEMS:
        raise ValueError(f"system {system} is not known; known are {', '.join(SYSTEMS)}")
    torch.set_num_threads(setup.threads)
    checkpointed = system.endswith("checkpointed")
    if system in TRL:
        from benchmarks.trl_update import TrlTraining

        with tempfile.TemporaryDirectory() as scratch:
            training = TrlTraining(folder, checkpointed=checkpointed, learning_rate=setup.learning_rate)
            training.train(batches, around, scratch, see_gradient=see_gradient)
        return
    if system in PREFIX_GROUPER:
        from benchmarks.prefix_grouper_update import PrefixGrouperUpdate

        update = PrefixGrouperUpdate(folder, checkpointed=checkpointed)
        model = update.model
    else:
        update, model = open_megatron(system, setup)
    optimizer = torch.optim.Adam(model.parameters(), lr=setup.learning_rate)
    for number, batch in enumerate(batches):
        with around(number):
            update.accumulate(batch)
            if see_gradient is not None:
                see_gradient(model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def open_megatron(system: str, setup: Setup):
    """(update, model) of one of the systems on Megatron's modules, in a world of this process alone."""
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    run, live = ("exact", EVERY_CHUNK) if system == "exact_live" else (system, 0)
    flags = {
        "--model-preset": setup.model_preset, "--chunk-size": setup.chunk_size, "--block-size": setup.block_size,
        "--responses-per-replay": setup.responses_per_replay, "--seed": setup.seed,
        "--live-chunks": live,
    }  # fmt: skip
    return build_update(parse_arguments([str(part) for flag in flags.items() for part in flag]), run)


def export_weights_of(setup: Setup, folder: Path) -> None:
    """Write the weights of the seed as transformers loads them."""
    export_model(open_megatron("conventional", setup)[1], setup.model_preset, folder)
