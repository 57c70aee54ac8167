"""Which weights a version is of: what changes the lineage and what does not, and engines that hold others."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from longstraw.rollout.config import SamplingConfig
from longstraw.rollout.protocol import Sample
from longstraw.rollout.routes import RoutedExperts
from longstraw.transaction.group import PromptGroup
from megatron.grpo.arguments import Machine, parse_arguments
from megatron.grpo.prompts import Prompt
from megatron.grpo.samplers import EngineSampler, SamplingFailure
from megatron.grpo.weight_lineage import WeightLineage, hash_flags, hash_group
from tests.support.models import one_rank

BASE = "--model-preset tiny-llama --prompt-data data.jsonl --tokenizer-path tok --train-iters 10 --output-dir out"


@pytest.fixture(scope="module")
def alone():
    """A world of this process, that of its other tests too."""
    one_rank()
    return dist.group.WORLD


def flags(words: str = "") -> str:
    return hash_flags(*parse_arguments(f"{BASE} {words}".split(), Machine(cuda=False, fused_adam=False, world_size=1)))


def make_group(name: str = "a", **changes) -> PromptGroup:
    experts = RoutedExperts(layers=(1,), topk=1, data=bytes(8))
    sample = Sample(prompt_id=name, token_ids=(1, 2), logprobs=(-0.5, -1.0), finish_reason="stop", weight_version=0, routes=experts)
    return PromptGroup(**{
        "prompt_id": name, "prompt": torch.tensor([[7, 8]]), "samples": [sample] * 2, "rewards": [0.0, 1.0],
        "scored": [True, True], "kept": [True, True], **changes,
    })  # fmt: skip


@pytest.mark.parametrize("words, differs", [
    ("--seed 7", False), ("--train-iters 20", False), ("--lr 1e-3", False), ("--response-block-size 64", False),
    ("--rollouts-from elsewhere", False), ("--reward math_verify", False),
    ("--kl-coefficient 0.1", True), ("--clip-range-low 0.1", True), ("--clip-grad 2", True), ("--adam-beta2 0.9", True),
    ("--bf16", True), ("--mask-truncated", True), ("--semantics response_only", True), ("--rollout-is token", True),
    ("--lora-rank 4", True), ("--optimizer logra", True),
])  # fmt: skip
def test_flags_count_where_an_update_depends_on_them(words, differs):
    assert (flags(words) != flags()) == differs


def test_flags_of_logra():
    base = "--optimizer logra --bf16"
    assert flags(f"{base} --logra-rank 8") != flags(base) == flags(f"{base} --logra-master-residency host")
    assert flags(f"{base} --train-iters 20") != flags(base)  # the budget's schedule ends with the run
    constant = f"{base} --kl-budget-schedule constant"
    assert flags(f"{constant} --train-iters 20") == flags(constant)


def test_rollouts_count_in_any_order_and_in_every_part():
    group = make_group()
    sample = group.samples[0]
    changed = [
        dataclasses.replace(sample, **change)
        for change in (dict(token_ids=(1, 3)), dict(logprobs=(-0.5, -1.5)), dict(finish_reason="length"), dict(routes=None),
                       dict(routes=dataclasses.replace(sample.routes, data=bytes([1] * 8))))  # fmt: skip
    ]
    others = [make_group("b"), make_group(prompt=torch.tensor([[7, 9]])), make_group(rewards=[1.0, 0.0]),
              make_group(kept=[True, False]), make_group(scored=[True, False])]  # fmt: skip
    others += [make_group(samples=[sample, other]) for other in changed]
    assert len({hash_group(one) for one in [group, *others]}) == 1 + len(others)
    assert hash_group(make_group()) == hash_group(group)


def test_a_step_moves_it_by_all_that_it_depends_on(alone):
    def after(value="v", start="s", told="f", groups=("a", "b"), number=1, rates=((1e-3, 0.1),)):
        lineage = WeightLineage(value=value, origin=value, start=start, flags=told, dp=alone)
        lineage.advance(number, lineage.digest([make_group(name) for name in groups]), rates)
        return lineage.value

    assert after() == after(groups=("b", "a")) == after(rates=((1e-3, 0.1), (1e-3, 0.1)))
    found = [after(), after(value="w"), after(start="t"), after(told="g"), after(groups=("a",)), after(number=2),
             after(rates=((1e-4, 0.1),)), after(rates=((1e-3, 0.0),))]  # fmt: skip
    assert len(set(found)) == len(found)


class Engine:
    """Holds weights of a version and a lineage, and says so."""

    def __init__(self, weight_version, lineage):
        self.weight_version, self.lineage = weight_version, lineage

    def generate(self, requests, *, group_size, **_):
        one = Sample(prompt_id="", token_ids=(1,), logprobs=(-0.5,), finish_reason="stop", weight_version=self.weight_version)
        return [[one] * group_size for _ in requests]


def make_sampler(alone, engine, follow=None) -> EngineSampler:
    return EngineSampler(
        "vllm", engine, SamplingConfig(), group_size=2, stop_ids=frozenset({1}), num_tokens=5, seed=1, replica=alone,
        device=torch.device("cpu"), follow=follow, wanted=lambda version: f"ours {version}",
    )  # fmt: skip


def sample(sampler):
    prompt = Prompt(prompt_id="p", token_ids=(1, 2), answer="", extra={})
    return sampler.sample([prompt], step=1, attempt=0, places=[0], alone=True)


def test_an_engine_with_another_runs_weights_is_brought_to_ours_or_refused(alone):
    engine = Engine(0, "theirs")
    followed = []

    def follow(version):
        followed.append(version)
        engine.lineage = f"ours {version}"

    sampler = make_sampler(alone, engine, follow)
    assert sampler.prepare(1) == "" == sampler.prepare(1) and followed == [0]
    assert len(sample(sampler)) == 1
    stubborn = make_sampler(alone, Engine(0, "theirs"), lambda version: None)
    assert "holds other weights of version 0 than this run's (lineage theirs there and ours 0 here)" in stubborn.prepare(1)
    unled = make_sampler(alone, Engine(0, "theirs"))
    assert unled.prepare(1) == ""  # its last answer may be old
    with pytest.raises(SamplingFailure, match="holds other weights of version 0"):
        sample(unled)
    assert len(sample(make_sampler(alone, Engine(0, None)))) == 1  # nobody has told it which
