"""One step on real modules, as the trainer drives it, against dense autograd of the objective's own formula.

Sequence-level importance (GSPO) is the hard one: a token's loss depends on all of its response, which is replayed block by
block.
"""

import pytest
import torch

from longstraw.objectives.config import ObjectiveConfig
from longstraw.patches.float64 import lift_float64
from longstraw.rollout.protocol import Sample
from longstraw.transaction.group import PromptGroup
from longstraw.transaction.step import Step
from tests.support.dense import compare_gradients, take_gradients
from tests.support.models import draw_group, get_small_hybrid, one_rank

ADVANTAGES = [0.8, -1.1, 0.3]


def open_group(pair, lengths, *, perturb):
    """A scored group whose old log-probabilities are the present ones, moved by up to `perturb`."""
    drawn = draw_group(21, lengths, pair.vocab_size)
    samples = [
        Sample(prompt_id="p", token_ids=tuple(r.tolist()), logprobs=(0.0,) * len(r), finish_reason="stop", weight_version=0)
        for r in drawn.responses
    ]
    group = PromptGroup("p", drawn.prompt, samples, rewards=[1.0, 0.0, 0.5], kept=[True] * 3, advantages=ADVANTAGES)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad(), lift_float64():
        group.old_logprobs = [
            dense_logprobs(pair, drawn.prompt, r) + perturb * (torch.rand(len(r), generator=generator, dtype=torch.float64) - 0.5)
            for r in drawn.responses
        ]  # fmt: skip
    return drawn, group


def dense_logprobs(pair, prompt, response):
    ids = torch.cat([prompt, response[None]], 1)
    mask = torch.ones(ids.shape[1] - 1, ids.shape[1] - 1, dtype=torch.bool).triu(1)[None, None]
    logits = pair.plain(ids[:, :-1], None, mask)[0, prompt.shape[1] - 1 :, : pair.vocab_size]
    return logits.log_softmax(-1).gather(1, response[:, None])[:, 0]


def dense_step(pair, drawn, group, config):
    """Loss and gradients by autograd through exp, min and clamp on whole sequences."""
    pair.plain.zero_grad()
    total, tokens = 0.0, sum(map(len, drawn.responses))
    with lift_float64():
        for response, old, advantage in zip(drawn.responses, group.old_logprobs, ADVANTAGES):
            new = dense_logprobs(pair, drawn.prompt, response)
            log_ratio = (new - old).mean().expand(len(new)) if config.importance_level == "sequence" else new - old
            ratio = log_ratio.exp()
            clipped = ratio.clamp(1 - config.clip_range_low, 1 + config.clip_range_high)
            losses = -torch.minimum(ratio * advantage, clipped * advantage)
            divisor = tokens if config.loss_aggregation == "token" else 3 * len(new)
            loss = losses.sum() * torch.tensor(1 / divisor, dtype=torch.float32).double()  # as the step's weights round
            loss.backward()
            total += loss.item()
    return total, take_gradients(pair.plain)


@pytest.mark.parametrize(
    "config",
    [ObjectiveConfig(), ObjectiveConfig(importance_level="sequence", loss_aggregation="sequence", clip_range_low=0.02)],
    ids=["grpo", "gspo"],
)
@pytest.mark.parametrize("together, block", [(1, 2), (3, 3), (2, 64)])
def test_a_step_equals_dense_autograd(config, together, block):
    pair, groups = get_small_hybrid(), one_rank()
    drawn, group = open_group(pair, (5, 1, 4), perturb=0.5)
    loss, expected = dense_step(pair, drawn, group, config)
    step = Step(pair.engine(response_block_size=block), config, dp=groups.dp, responses_together=together)
    pair.model.zero_grad()
    with lift_float64():
        result = step.replay([group], step.count_terms([group]))
    total, _ = compare_gradients(take_gradients(pair.model), expected)
    assert total <= 1e-12 and result.loss == pytest.approx(loss, rel=1e-12)
    assert group.state is None and int(result.statistics.num_tokens) == 10


def test_without_old_logprobs_the_ratio_is_exactly_one():
    pair, groups = get_small_hybrid(), one_rank()
    _, group = open_group(pair, (5, 1, 4), perturb=0.0)
    group.old_logprobs = None
    step = Step(pair.engine(), ObjectiveConfig(), dp=groups.dp)
    with lift_float64():
        result = step.replay([group], step.count_terms([group]))
    take_gradients(pair.model)
    means = result.statistics.means()
    assert means["ratio_mean"] == 1.0 and means["old_kl"] == 0.0
    assert [len(row) for row in group.old_logprobs] == [5, 1, 4]
