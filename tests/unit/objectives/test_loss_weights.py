"""Loss weights: divided once by the step's counts, whatever is replayed together."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw.objectives import LossCounts, ObjectiveConfig, compute_loss_weights, count_loss_terms

TOKEN = ObjectiveConfig(loss_aggregation="token")
SEQUENCE = ObjectiveConfig(loss_aggregation="sequence")
CONSTANT = ObjectiveConfig(loss_aggregation="group_constant", loss_constant=10)
masks_lists = st.lists(
    st.lists(st.booleans(), min_size=0, max_size=9).map(lambda kept: torch.tensor(kept, dtype=torch.bool)),
    min_size=1,
    max_size=6,
).filter(lambda masks: any(mask.any() for mask in masks))


def weighted_loss(masks, losses, config, counts):
    weights = compute_loss_weights(masks, config, counts=counts, dtype=torch.float64)
    return sum((w * l).sum() for w, l in zip(weights, losses))


def test_short_loss_one_and_long_loss_zero_is_a_quarter_under_every_split():
    masks = [torch.ones(1), torch.ones(3)]
    losses = [torch.ones(1), torch.zeros(3)]
    counts = count_loss_terms(masks)
    assert weighted_loss(masks, losses, TOKEN, counts).item() == 0.25
    # Micro-batches of one, and two data-parallel ranks with one each: the parts add up.
    assert count_loss_terms(masks[:1]) + count_loss_terms(masks[1:]) == counts
    parts = [weighted_loss(masks[i : i + 1], losses[i : i + 1], TOKEN, counts).item() for i in range(2)]
    assert sum(parts) == 0.25
    # Padding a response changes nothing.
    padded = [torch.tensor([1, 0, 0]), torch.ones(3)]
    assert weighted_loss(padded, [torch.tensor([1.0, 9.0, 9.0]), torch.zeros(3)], TOKEN, count_loss_terms(padded)) == 0.25


def test_truncated_masked_response_leaves_numerator_and_denominator():
    masks = [torch.ones(3), torch.zeros(5)]
    counts = count_loss_terms(masks)
    assert counts == LossCounts(num_tokens=3, num_sequences=1)
    for config, weight in ((TOKEN, 1 / 3), (SEQUENCE, 1 / 3), (CONSTANT, 1 / 10)):
        kept, dropped = compute_loss_weights(masks, config, counts=counts, dtype=torch.float64)
        assert kept.tolist() == pytest.approx([weight] * 3)
        assert dropped.tolist() == [0.0] * 5


@settings(max_examples=60, deadline=None)
@given(masks_lists)
def test_weights_equal_the_formulas(masks):
    counts = count_loss_terms(masks)
    kept = [mask.sum().item() for mask in masks]
    sequences = sum(n > 0 for n in kept)
    losses = [torch.randn(len(mask), dtype=torch.float64) for mask in masks]
    sums = [loss[mask].sum().item() for loss, mask in zip(losses, masks)]
    expected = {
        TOKEN: sum(sums) / sum(kept),
        SEQUENCE: sum(s / n for s, n in zip(sums, kept) if n) / sequences,
        CONSTANT: sum(s / 10 for s in sums) / sequences,
    }
    for config, value in expected.items():
        assert weighted_loss(masks, losses, config, counts).item() == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("config", [TOKEN, SEQUENCE, CONSTANT], ids=lambda c: c.loss_aggregation)
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2])
def test_gradient_does_not_depend_on_micro_batch_or_data_parallel_split(config, micro_batch, ranks):
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 7, 3, 5, 2, 4, 6, 8]
    inputs = [torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in lengths]
    masks = [torch.rand(n, generator=generator) < 0.7 for n in lengths]
    masks[4][:] = False
    parameter = torch.randn(5, generator=generator, dtype=torch.float64)

    def gradient(ranks, micro_batch):
        """Sum of the ranks' gradients, each accumulated over its micro-batches."""
        total = torch.zeros_like(parameter)
        shares = [range(r, 8, ranks) for r in range(ranks)]
        counts = sum((count_loss_terms([masks[i] for i in share]) for share in shares[1:]),
                     count_loss_terms([masks[i] for i in shares[0]]))  # fmt: skip
        for share in shares:
            for start in range(0, len(share), micro_batch):
                batch = share[start : start + micro_batch]
                leaf = parameter.clone().requires_grad_()
                losses = [(inputs[i] @ leaf).tanh() for i in batch]
                weighted_loss([masks[i] for i in batch], losses, config, counts).backward()
                total += leaf.grad
        return total

    reference = gradient(1, 8)
    torch.testing.assert_close(gradient(ranks, micro_batch), reference, rtol=1e-13, atol=1e-14)


def test_a_rank_without_trained_tokens_gets_zero_weights():
    weights = compute_loss_weights(
        [torch.zeros(2), torch.zeros(0)], SEQUENCE, counts=LossCounts(num_tokens=9, num_sequences=2)
    )
    assert [w.tolist() for w in weights] == [[0.0, 0.0], []]


def test_refuses_a_step_without_trained_tokens():
    with pytest.raises(ValueError, match="No token of this step is trained"):
        compute_loss_weights([torch.zeros(4)], TOKEN, counts=LossCounts(num_tokens=0, num_sequences=0))


def test_refuses_counts_that_are_not_the_steps():
    with pytest.raises(ValueError, match="less than"):
        compute_loss_weights([torch.ones(4)], TOKEN, counts=LossCounts(num_tokens=3, num_sequences=1))


@pytest.mark.parametrize("mask", [torch.tensor([0.5, 1.0]), torch.tensor([float("nan")]), torch.ones(2, 2)])
def test_refuses_masks_that_are_no_masks(mask):
    with pytest.raises(ValueError, match="loss mask must"):
        count_loss_terms([mask])
