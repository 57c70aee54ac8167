"""The loss of a group's responses: padding, blocks and batches change nothing; statistics count what is trained."""

import pytest
import torch

from longstraw.objectives.config import ObjectiveConfig
from longstraw.objectives.loss_weights import compute_loss_weights, count_loss_terms
from longstraw.rollout.protocol import Sample
from longstraw.transaction.group import GroupLoss, PromptGroup, make_batches, split_logprobs

LENGTHS = (5, 1, 3)
GSPO = ObjectiveConfig(importance_level="sequence", loss_aggregation="sequence", clip_range_low=3e-4, clip_range_high=4e-4)
KL = ObjectiveConfig(kl_coefficient=0.3)
CONSTANT = ObjectiveConfig(loss_aggregation="group_constant", loss_constant=7, advantage_std_normalization=False)


def make_group(*, kept=(True, True, True)) -> PromptGroup:
    generator = torch.Generator().manual_seed(4)
    group = PromptGroup("p", torch.tensor([[3, 1, 4, 1, 5]]), [
        Sample(prompt_id="p", token_ids=tuple(range(10 * i, 10 * i + n)), logprobs=(0.0,) * n, finish_reason="stop",
               weight_version=0)
        for i, n in enumerate(LENGTHS)
    ])  # fmt: skip
    group.rewards, group.kept, group.advantages = [1.0, 0.0, 0.5], list(kept), [0.9, -1.3, 0.4]
    group.ref_logprobs = [-torch.rand(n, generator=generator, dtype=torch.float64) for n in LENGTHS]
    return group


def draw_logprobs(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [-3 * torch.rand(n, generator=generator, dtype=torch.float64) for n in LENGTHS]


def pad(rows, width):
    return torch.stack([torch.nn.functional.pad(row, (0, width - len(row)), value=-50.0) for row in rows])


def evaluate(config, *, batches, block, kept=(True, True, True)):
    """Total loss, its gradient by each response's log-probabilities, and the statistics."""
    group, old, current = make_group(kept=kept), draw_logprobs(1), draw_logprobs(2)
    masks = group.loss_masks()
    weights = compute_loss_weights(masks, config, counts=count_loss_terms(masks), dtype=torch.float64)
    total, grads, statistics = 0.0, {}, []
    for indices in batches:
        width = max(LENGTHS[i] for i in indices)
        rows = pad([current[i] for i in indices], width).requires_grad_()
        loss = GroupLoss(
            group, indices, weights, config, width, old=[old[i] for i in indices], current=[current[i] for i in indices]
        )
        parts = [loss(rows[:, a : a + block], slice(a, min(a + block, width))) for a in range(0, width, block)]
        sum(parts).backward()
        total += sum(parts).item()
        statistics.append(loss.statistics)
        grads |= {i: rows.grad[row, : LENGTHS[i]] for row, i in enumerate(indices)}
        for row, i in enumerate(indices):
            assert not rows.grad[row, LENGTHS[i] :].any(), "padding has a gradient"
    return total, [grads[i] for i in range(len(LENGTHS))], sum(statistics[1:], start=statistics[0])


@pytest.mark.parametrize("config", [ObjectiveConfig(), GSPO, KL, CONSTANT], ids=["grpo", "gspo", "kl", "constant"])
@pytest.mark.parametrize("batches", [[[0, 1, 2]], [[0, 1], [2]], [[0], [1], [2]]], ids=str)
@pytest.mark.parametrize("block", [1, 2, 5])
def test_batches_and_blocks_change_nothing(config, batches, block):
    total, grads, statistics = evaluate(config, batches=batches, block=block)
    whole, expected, counted = evaluate(config, batches=[[0], [1], [2]], block=99)
    assert total == pytest.approx(whole, rel=1e-14) and whole != 0.0
    for found, wanted in zip(grads, expected):
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-16)
    assert statistics.means() == pytest.approx(counted.means(), rel=1e-12)
    assert statistics.num_tokens == sum(LENGTHS)


@pytest.mark.parametrize("config", [ObjectiveConfig(), GSPO], ids=["grpo", "gspo"])
def test_the_loss_is_that_of_the_formula(config):
    """Autograd through exp, min and clamp on whole responses, as the papers write it (GRPO eq. 3; GSPO eq. 5)."""
    old, current = draw_logprobs(1), [row.requires_grad_() for row in draw_logprobs(2)]
    group, expected = make_group(), 0.0
    for o, p, advantage in zip(old, current, group.advantages):
        log_ratio = (p - o).mean().expand(len(p)) if config.importance_level == "sequence" else p - o
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - config.clip_range_low, 1 + config.clip_range_high)
        losses = -torch.minimum(ratio * advantage, clipped * advantage)
        divisor = len(p) * 3 if config.loss_aggregation == "sequence" else sum(LENGTHS)
        expected = expected + losses.sum() / divisor
    expected.backward()
    total, grads, _ = evaluate(config, batches=[[0, 1, 2]], block=2)
    assert total == pytest.approx(expected.item(), rel=1e-13)
    for found, row in zip(grads, current):
        torch.testing.assert_close(found, row.grad, rtol=1e-12, atol=1e-15)


def test_a_response_left_out_has_no_loss_and_is_not_counted():
    total, grads, statistics = evaluate(ObjectiveConfig(), batches=[[0, 1, 2]], block=2, kept=(True, False, True))
    assert not grads[1].any() and grads[0].any() and grads[2].any()
    assert statistics.num_tokens == 8 and total != 0.0


def test_batches_are_padded_and_split_again():
    group = make_group()
    batches = make_batches(group, 2)
    assert [indices for indices, _ in batches] == [[0, 1], [2]]
    first = batches[0][1]
    assert first.inputs.tolist() == [[5, 0, 1, 2, 3], [5, 10, 0, 0, 0]]  # the prompt's last token, then the response's
    assert first.targets.tolist() == [[0, 1, 2, 3, 4], [10, 0, 0, 0, 0]]
    rows = split_logprobs(group, [0, 1], torch.arange(10.0).view(2, 5))
    assert [row.tolist() for row in rows] == [[0, 1, 2, 3, 4], [5]]
