"""The script of `test_equal_steps.py`: gradients of every system in two steps, relative to the dense ones of transformers."""

import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

import longstraw.patches.process_groups as process_groups
from benchmarks.points import MEGATRON, SYSTEMS
from benchmarks.systems import Setup, draw_centred, export_weights_of, run_steps
from benchmarks.transformers_model import load_model
from benchmarks.updates import Batch, weighted_loss
from megatron.grpo.conversion.weights import hf_tensors
from megatron.grpo.presets import get_preset

Gradient = dict[str, torch.Tensor]
LEARNING_RATE = 1e-3
"""Large enough for a step to show in the next one's gradient."""


def main(scratch: Path, presets: list[str]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups = process_groups.initialize_groups()
    process_groups.initialize_groups = lambda **_: groups  # the systems share this process, and its groups
    found = {preset: compare(preset, scratch) for preset in presets}
    (scratch / "errors.json").write_text(json.dumps(found))


def compare(preset: str, scratch: Path) -> dict[str, dict[str, float]]:
    """Relative errors of a preset's systems."""
    setup = Setup(model_preset=preset, chunk_size=16, block_size=4, responses_per_replay=3, learning_rate=LEARNING_RATE)
    folder = scratch / preset
    export_weights_of(setup, folder)
    batch = draw_centred(setup, 40, 7, 4)
    batches = [batch, draw_centred(replace(setup, seed=2), 33, 5, 4)]
    dense = take_dense_steps(folder, batches)
    unmoved = take_dense_steps(folder, batches[1:])[0]
    found = {"dense": {"moved": relative_error(unmoved, dense[1])}}
    for system in SYSTEMS:
        gradients = take_steps(system, setup, folder, batches)
        first, second = (relative_error(*pair) for pair in zip(gradients, dense, strict=True))
        found[system] = {"gradient": first, "second_gradient": second}
        if system in ("trl", "prefix_grouper"):
            other = replace(batch, advantages=batch.advantages.roll(1))
            found[system]["other_advantages"] = relative_error(take_steps(system, setup, folder, [other])[0], dense[0])
    return found


def take_steps(system: str, setup: Setup, folder: Path, batches: list[Batch]) -> list[Gradient]:
    """The gradient of each step, by transformers' names."""
    found: list[Gradient] = []

    def see_gradient(model) -> None:
        if system in MEGATRON:
            found.append(name_gradient(model, setup.model_preset))
        else:
            found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})

    run_steps(system, setup, folder, batches, lambda number: contextlib.nullcontext(), see_gradient=see_gradient)
    return found


@torch.no_grad()
def name_gradient(model, preset: str) -> Gradient:
    """A Megatron model's gradient by transformers' names: conversion moves values and changes none, so it may move these."""
    weights = {name: parameter.data for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = parameter.grad
    found = {name: tensor.clone() for name, tensor in hf_tensors(model, get_preset(preset))}
    for name, parameter in model.named_parameters():
        parameter.data = weights[name]
    return found


def take_dense_steps(folder: Path, batches: list[Batch]) -> list[Gradient]:
    """Full sequences, one graph over the group, torch's own log-softmax: nothing of the benchmark but its objective."""
    model, found = load_model(folder), []
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for batch in batches:
        group, tokens = batch.responses.shape
        ids = torch.cat([batch.prompt.expand(group, -1), batch.responses], 1)
        logits = model(input_ids=ids, use_cache=False).logits[:, -tokens - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, batch.responses[..., None])[..., 0]
        weighted_loss(logprobs, logprobs.detach(), batch.advantages, batch.weights).backward()
        found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return found


def relative_error(found: Gradient, expected: Gradient) -> float:
    """Norm of the difference over the norm, of all parameters together."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    difference = sum((found[name] - expected[name]).square().sum() for name in expected)
    return (difference / sum(tensor.square().sum() for tensor in expected.values())).sqrt().item()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
