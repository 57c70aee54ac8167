"""Experts in float32 and bf16 against a float64 oracle: no less precise than Megatron's own layers in the same dtype.

Routing is pinned to the oracle's: a choice that falls elsewhere is another function, not an error of this one.
"""

import functools

import pytest
import torch

from longstraw.adapters.expert_routing import ExpertRoutingAdapter
from longstraw.adapters.registry import find_routers
from longstraw.patches.float64 import lift_float64
from megatron.grpo.model_provider import build_conventional_model
from megatron.grpo.presets import get_preset
from tests.support.dense import dense_gradients
from tests.support.models import build_pair, draw_document, one_rank, replay_gradients

DOCUMENT = draw_document(45, 128)
CASES = [  # in bf16 the selections of sparse attention, which are not pinned, would decide
    ("tiny-qwen3-moe", torch.float32), ("tiny-qwen3-moe", torch.bfloat16), ("tiny-glm5.2", torch.float32),
]


class Choices:
    """Stands in for Megatron's RouterReplay on one router: keeps the experts of the first pass, repeats them later."""

    layer_number = None

    def __init__(self):
        self.chosen = None

    def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        if self.chosen is None:
            self.chosen = default_compute_topk(scores, topk, num_groups, group_topk)[1].sort(1).values
        return scores.gather(1, self.chosen), self.chosen


def routers_of(plain):
    return [m for m in plain.modules() if type(m).__name__ == "TopKRouter"]


@functools.cache
def compared(name: str, dtype: torch.dtype):
    """The pair, the oracle's choices by layer, and its gradients."""
    pair = build_pair(get_preset(name), dtype, one_rank())
    choices = {router.layer_number: Choices() for router in routers_of(pair.plain)}
    for router in routers_of(pair.plain):
        router.router_replay = choices[router.layer_number]
    with lift_float64():
        _, oracle = dense_gradients(pair.plain, DOCUMENT.sequences(), vocab_size=128)
    return pair, choices, oracle


def megatrons_gradients(name: str, dtype: torch.dtype):
    """Megatron's own model of the same weights in the narrow dtype, with the oracle's choices."""
    pair, choices, _ = compared(name, dtype)
    config = pair.preset.transformer_config(use_cpu_initialization=True)
    plain = build_conventional_model(pair.preset, config, one_rank(), flash=False).to(dtype)
    plain.load_state_dict({k: v for k, v in pair.plain.state_dict().items() if torch.is_tensor(v)}, strict=False)
    for router in routers_of(plain):
        router.router_replay = choices[router.layer_number]
    return dense_gradients(plain, DOCUMENT.sequences(), vocab_size=128)[1]


def our_gradients(name: str, dtype: torch.dtype, monkeypatch):
    """The engine's, with the oracle's choices in place of its record."""
    pair, choices, _ = compared(name, dtype)
    original = ExpertRoutingAdapter.restore

    def restore(self, segment, block, policy, *, replay, stop_here, live):
        run = original(self, segment, block, policy, replay=replay, stop_here=stop_here, live=live)
        layout = segment.plan[block]
        run.recorded = choices[self.layer_number].chosen[layout.start : layout.start + layout.length]
        return run

    monkeypatch.setattr(ExpertRoutingAdapter, "restore", restore)
    assert find_routers(pair.model)
    return replay_gradients(pair.engine(response_block_size=16), DOCUMENT.tree())[1]


def error(found, oracle) -> float:
    squares = sum((found[n].double() - o).square().sum().item() for n, o in oracle.items())
    return (squares / sum(o.square().sum().item() for o in oracle.values())) ** 0.5


@pytest.mark.parametrize("name, dtype", CASES)
def test_as_precise_as_megatrons_layers(name, dtype, monkeypatch):
    oracle = compared(name, dtype)[2]
    plain = error(megatrons_gradients(name, dtype), oracle)
    ours = error(our_gradients(name, dtype, monkeypatch), oracle)
    assert ours <= 2 * plain, (ours, plain)
