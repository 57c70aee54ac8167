"""The recall task's warm start: what the gated delta nets look up before any training, and what counts as accuracy.

That it learns, and what RL makes of it, is the quickstart's own run.
"""

import math
import sys
from pathlib import Path
from random import Random

import pytest
import torch

REPOSITORY = Path(__file__).parents[3]
sys.path.insert(0, str(REPOSITORY / "examples" / "recall"))

from recall_task import RecallVocabulary, make_warm_start_sequence  # noqa: E402
from warm_start import Batch, start_as_memory  # noqa: E402

from longstraw.adapters.gated_delta_net import StatefulGatedDeltaNet  # noqa: E402
from longstraw.patches.process_groups import seed_model_parallel  # noqa: E402
from megatron.grpo.model_provider import build_model  # noqa: E402
from megatron.grpo.presets import get_preset  # noqa: E402
from tests.support.models import one_rank  # noqa: E402


@pytest.fixture(scope="module")
def nets():
    """The gated delta nets of a tiny model, started as memories."""
    groups = one_rank()
    seed_model_parallel(3)
    preset = get_preset("tiny-qwen3.6")
    model = build_model(preset, preset.transformer_config(use_cpu_initialization=True), groups)
    start_as_memory(model, 3)
    return [module for module in model.modules() if isinstance(module, StatefulGatedDeltaNet)]


@torch.no_grad()
def test_a_key_is_looked_up_by_the_word_before_it(nets):
    assert len(nets) == 3
    words = torch.randn(20, 1, 128, generator=torch.Generator().manual_seed(4))  # [s, b, hidden], as after a norm
    for net in nets:
        width, heads = net.qk_dim_local_tp, net.qk_dim_local_tp // net.key_head_dim
        projected, _ = net.in_proj(words)
        channels = projected[:, :, : net.conv1d.weight.shape[0]].transpose(0, 1)
        mixed, _ = net._convolve(channels, net.zero_state(1, words).conv)
        queries, keys = mixed[0, :, :width].view(20, heads, -1), mixed[0, :, width : 2 * width].view(20, heads, -1)
        likeness = torch.nn.functional.cosine_similarity(keys[:, None], queries[None], dim=-1).mean(-1)
        assert torch.equal(likeness[1:].argmax(1), torch.arange(19)), likeness


def test_memories_start_long(nets):
    for net in nets:
        steps = torch.nn.functional.softplus(net.dt_bias.detach())
        assert 0.00099 < steps.min() and steps.max() < 0.101, steps
        assert steps.unique().numel() == steps.numel()


def test_accuracy_counts_values_and_the_loss_every_answer_token():
    rng, vocabulary = Random(5), RecallVocabulary()
    sequences = [
        make_warm_start_sequence(rng, vocabulary, num_facts=3, context_tokens=9, num_questions=4, answer_tokens=2)
        for _ in range(2)
    ]
    batch = Batch(sequences, ranks=3)
    logprobs = torch.full(batch.segment.targets.shape, -9.0)  # of what no loss is on
    places = [9 + 5 * question + 1 for question in range(4)]  # the first value of each answer, among the targets
    for place in places:
        logprobs[:, place : place + 3] = math.log(0.9)  # two values and <eos>
    logprobs[0, places[0]] = math.log(0.4)  # a value that is missed
    logprobs[1, places[1] + 2] = math.log(0.1)  # an <eos> that is missed
    wide = batch.loss(logprobs[:, :15], slice(0, 15)) + batch.loss(logprobs[:, 15:], slice(15, None))
    assert batch.accuracy().item() == pytest.approx(15 / 16)
    assert wide.item() == pytest.approx(-(22 * math.log(0.9) + math.log(0.4) + math.log(0.1)) / (24 * 3))
