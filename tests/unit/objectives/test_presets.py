"""Each recipe, run through advantages, weights and token losses block by block, equals its published formula
differentiated by autograd over whole responses."""

import pytest
import torch

from longstraw.objectives import (
    RECIPES,
    ObjectiveConfig,
    compute_advantages,
    compute_loss_weights,
    count_loss_terms,
    sequence_log_ratio,
    token_policy_loss,
)

REWARDS = torch.tensor([1.0, 0.0, 0.25, 0.0], dtype=torch.float64)
LENGTHS = [5, 1, 8, 3]
CONSTANT = 16
BASELINE = 0.4


def clipped(ratio, advantage, low, high):
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def std(x):
    return (x - x.mean()).square().sum().div(len(x) - 1).sqrt()


def grpo(p, old, ref):
    a = (REWARDS - REWARDS.mean()) / std(REWARDS)
    loss = 0.0
    for i, n in enumerate(LENGTHS):
        k3 = (ref[i] - p[i]).exp() - 1 - (ref[i] - p[i])
        loss += (-clipped((p[i] - old[i]).exp(), a[i], 0.2, 0.2) + 0.04 * k3).sum() / n / 4
    return loss


def dr_grpo(p, old, ref):
    a = REWARDS - REWARDS.mean()
    return sum(-clipped((p[i] - old[i]).exp(), a[i], 0.2, 0.2).sum() / CONSTANT / 4 for i in range(4))


def dapo(p, old, ref):
    a = (REWARDS - REWARDS.mean()) / std(REWARDS)
    return sum(-clipped((p[i] - old[i]).exp(), a[i], 0.2, 0.28).sum() for i in range(4)) / sum(LENGTHS)


def gspo(p, old, ref):
    a = (REWARDS - REWARDS.mean()) / std(REWARDS)
    return sum(-clipped((p[i] - old[i]).mean().exp(), a[i], 3e-4, 4e-4) / 4 for i in range(4))


def ppo(p, old, ref):
    return sum(-clipped((p[i] - old[i]).exp(), REWARDS[i] - BASELINE, 0.2, 0.2).sum() for i in range(4)) / sum(LENGTHS)


def replayed_loss(p, old, ref, config, block):
    """The step as LongStraw replays it: response by response, block by block, one backward each."""
    advantages = compute_advantages(REWARDS, config, baseline=BASELINE)
    masks = [torch.ones(n) for n in LENGTHS]
    weights = compute_loss_weights(masks, config, counts=count_loss_terms(masks), dtype=torch.float64)
    total, clipped_tokens = 0.0, 0
    for i, n in enumerate(LENGTHS):
        known = sequence_log_ratio(p[i], old[i]) if config.importance_level == "sequence" else None
        for start in range(0, n, block):
            b = slice(start, start + block)
            result = token_policy_loss(
                p[i][b], old[i][b], advantages[i], config=config, sequence_log_ratio=known,
                ref_logprobs=ref[i][b] if config.kl_coefficient else None,
            )  # fmt: skip
            loss = (weights[i][b] * result.loss).sum()
            loss.backward()
            total += loss.item()
            clipped_tokens += int(result.clipped.sum())
    return total, clipped_tokens


@pytest.mark.parametrize("block", [1, 3, 8])
@pytest.mark.parametrize("name, formula", [("grpo", grpo), ("dr_grpo", dr_grpo), ("dapo", dapo), ("gspo", gspo), ("ppo", ppo)])
@pytest.mark.parametrize("spread", [1e-4, 0.3])
def test_recipe_equals_its_formula(name, formula, block, spread):
    generator = torch.Generator().manual_seed(3)

    def draw(scale):
        return [scale * torch.randn(n, generator=generator, dtype=torch.float64) for n in LENGTHS]

    old = [x - 2 for x in draw(1.0)]
    start = [o + d for o, d in zip(old, draw(spread))]
    ref = [o + d for o, d in zip(old, draw(0.5))]
    config = ObjectiveConfig(**RECIPES[name], **({"loss_constant": CONSTANT} if name == "dr_grpo" else {}))

    dense = [s.clone().requires_grad_() for s in start]
    reference = formula(dense, old, ref)
    reference.backward()
    replayed = [s.clone().requires_grad_() for s in start]
    loss, clipped_tokens = replayed_loss(replayed, old, ref, config, block)

    assert loss == pytest.approx(reference.item(), rel=1e-13)
    torch.testing.assert_close([r.grad for r in replayed], [d.grad for d in dense], rtol=1e-12, atol=1e-15)
    # The comparison sees a wrong clip only where some tokens are clipped and some are not.
    assert any(d.grad.abs().sum() > 0 for d in dense)
    assert (clipped_tokens > 0) == (spread > 0.1)


def test_every_recipe_is_a_valid_config_and_dapo_filters():
    for name, recipe in RECIPES.items():
        ObjectiveConfig(**recipe, **({"loss_constant": CONSTANT} if name == "dr_grpo" else {}))
    assert RECIPES["dapo"]["group_filter"] == "drop_uniform"
    with pytest.raises(ValueError, match="--loss-constant"):
        ObjectiveConfig(**RECIPES["dr_grpo"])
    with pytest.raises(TypeError):
        RECIPES["dapo"]["clip_range_high"] = 1.0
