"""Predicted KL: forward mode against finite differences and against what a step really does."""

from dataclasses import replace

import pytest
import torch

from longstraw.optim.config import LograConfig
from longstraw.optim.step_control import StepControlError, choose_alpha
from longstraw.patches.float64 import lift_float64
from tests.support.logra import prompt_group, sketched
from tests.support.models import draw_group, get_pair, get_small_hybrid

CONFIG = LograConfig(logra_rank=8, kl_probe_responses=3)


def open_probe(under, group, **changes):
    """(probe, base, group of a step, eta) after one replay; changes: to the configuration."""
    under.pair.engine().replay(group.tree())
    direction = under.logra.prepare()
    probe = replace(under, config=replace(under.config, **changes)).probe()
    step_group = prompt_group(group)
    step_group.state = probe.step.capture(group.prompt)
    return probe, probe.open([step_group], direction.eta), [step_group], direction.eta


@pytest.mark.parametrize("preset", ["tiny-qwen3.6", "tiny-llama"])
def test_forward_mode_equals_finite_differences(preset):
    pair = get_pair(preset)
    with sketched(pair, CONFIG) as under, lift_float64():
        probe, base, group, eta = open_probe(under, draw_group(43, (5, 17, 1), pair.vocab_size))
        by_derivative = probe.measure_rate(base, group, eta, budget=1e-4)
        size = 1e-3
        kl = probe.measure_kl(base, group, size * eta) + probe.measure_kl(base, group, -size * eta)
        assert base.contexts == 23
        assert by_derivative == pytest.approx(kl / (2 * size**2), rel=1e-4)
        by_difference = replace(under, config=replace(CONFIG, kl_probe="finite-difference")).probe()
        found = by_difference.measure_rate(by_difference.open(group, eta), group, eta, budget=1e-4)
        assert found == pytest.approx(by_derivative, rel=0.01)


@pytest.mark.parametrize("prompt, responses", [(1, (1,)), (2, (1, 3)), (37, (9, 2))])
def test_any_sizes(prompt, responses):
    pair = get_small_hybrid()
    with sketched(pair, CONFIG) as under, lift_float64():
        probe, base, group, eta = open_probe(under, draw_group(prompt, responses, pair.vocab_size))
        kl = probe.measure_kl(base, group, 1e-3 * eta) + probe.measure_kl(base, group, -1e-3 * eta)
        assert probe.measure_rate(base, group, eta, budget=1e-4) == pytest.approx(kl / 2e-6, rel=1e-3)


@pytest.mark.parametrize("preset, scope", [("tiny-qwen3.6", "response"), ("tiny-llama", "full"), ("tiny-glm5.2", "response")])
def test_a_moved_pass_is_the_model_with_moved_weights(preset, scope):
    """The probe's KL at a step equals the KL after the weights really took it; under "full" with a new capture."""
    pair, small = get_pair(preset), 1e-6
    with sketched(pair, CONFIG) as under, lift_float64():
        changes = dict(kl_probe="finite-difference", kl_probe_scope=scope)
        probe, base, group, eta = open_probe(under, draw_group(43, (5, 17), pair.vocab_size), **changes)
        assert (group[0].state is None) == (scope == "full")
        probed = probe.measure_kl(base, group, small * eta)
        under.logra.apply(small * eta)
        assert probed > 0 and probe.measure_kl(base, group) == pytest.approx(probed, rel=1e-5)


def test_the_budget_is_kept():
    """Predicted against measured KL at the alpha that each budget allows; the error is the third order's."""
    pair = get_pair("tiny-qwen3.6")
    with sketched(pair, CONFIG) as under, lift_float64():
        probe, base, group, eta = open_probe(under, draw_group(43, (5, 17, 1), pair.vocab_size))
        rate = probe.measure_rate(base, group, eta, budget=1e-4)
        for budget, bar in ((1e-5, 0.05), (1e-4, 0.15), (1e-3, 0.5)):
            alpha = choose_alpha(rate, budget, alpha_max=100.0)
            assert probe.measure_kl(base, group, alpha * eta) == pytest.approx(budget, rel=bar)


@pytest.mark.parametrize("kind", ["jvp", "finite-difference"])
def test_responses_of_different_length_together(kind):
    """Padding is no context, and changes none."""
    pair = get_small_hybrid()
    with sketched(pair, replace(CONFIG, kl_probe=kind)) as under, lift_float64():
        alone, base, group, eta = open_probe(under, draw_group(9, (5, 17, 1), pair.vocab_size))
        expected = alone.measure_rate(base, group, eta, budget=1e-4), alone.measure_kl(base, group, eta)
        probe = under.probe(together=3)
        base = probe.open(group, eta)
        assert base.contexts == 23
        found = probe.measure_rate(base, group, eta, budget=1e-4), probe.measure_kl(base, group, eta)
        assert found == pytest.approx(expected, rel=1e-9)


def test_truncated_probes_count_their_contexts():
    pair = get_small_hybrid()
    with sketched(pair, replace(CONFIG, kl_probe_tokens=4, kl_probe_responses=2)) as under, lift_float64():
        _, base, _, _ = open_probe(under, draw_group(9, (5, 17, 1), pair.vocab_size))
        assert base.contexts == 8


def test_without_any_context_the_step_is_refused():
    """Not taken at its largest, as a q of 0 would be."""
    pair = get_small_hybrid()
    with sketched(pair, CONFIG) as under, lift_float64():
        probe, *_ = open_probe(under, draw_group(9, (5,), pair.vocab_size))
        base = probe.open([], 1.0)
        assert base.contexts == 0 and probe.measure_kl(base, [], 1.0) == 0.0
        for kind in ("jvp", "finite-difference"):
            probe.config = replace(CONFIG, kl_probe=kind)
            with pytest.raises(StepControlError, match="there is no response to probe"):
                probe.measure_rate(base, [], 1.0, budget=1e-4)


def test_weights_and_products_are_as_before_a_probe():
    pair = get_pair("tiny-glm5.2")
    with sketched(pair, CONFIG) as under, lift_float64():
        before = {n: p.detach().clone() for n, p in pair.model.named_parameters()}
        probe, base, group, eta = open_probe(under, draw_group(9, (5,), pair.vocab_size), kl_probe="finite-difference")
        probe.measure_rate(base, group, eta, budget=1e-4)
        assert probe.measure_kl(base, group) == 0.0
        assert all(torch.equal(p, before[n]) for n, p in pair.model.named_parameters())
        with pytest.raises(ValueError, match="--kl-probe jvp cannot follow"):
            with under.model.moved(torch.zeros(())):
                pass


def test_probes_are_dealt_out_among_prompts():
    """q and the KL of two prompts are the means over the contexts of both."""
    pair = get_small_hybrid()
    with sketched(pair, replace(CONFIG, kl_probe_responses=3, kl_probe_prompts=2)) as under, lift_float64():
        _, _, first, eta = open_probe(under, draw_group(9, (5, 17, 1), pair.vocab_size))
        probe = under.probe()
        second = prompt_group(draw_group(23, (4, 3), pair.vocab_size, seed=5))
        second.state = probe.step.capture(second.prompt)
        groups = [second, *first]  # the last one is probed first, and has one response more
        base = probe.open(groups, eta)
        assert base.contexts == 5 + 17 + 4
        found = probe.measure_rate(base, groups, eta, budget=1e-4), probe.measure_kl(base, groups, eta)
        sums = [0.0, 0.0]
        for group, responses, contexts in ((first, 2, 22), ([second], 1, 4)):
            probe.config = replace(CONFIG, kl_probe_responses=responses)
            base = probe.open(group, eta)
            sums[0] += contexts * probe.measure_rate(base, group, eta, budget=1e-4)
            sums[1] += contexts * probe.measure_kl(base, group, eta)
        assert found == pytest.approx([value / 26 for value in sums], rel=1e-9)


@pytest.mark.parametrize("start", [0.5, 50.0])
def test_finite_differences_stay_within_the_budget(start):
    """From a first step far too long they come to the derivative's q, within 1 %."""
    pair = get_pair("tiny-qwen3.6")
    with sketched(pair, replace(CONFIG, kl_probe_step=start)) as under, lift_float64():
        probe, base, group, eta = open_probe(under, draw_group(43, (5, 17, 1), pair.vocab_size))
        expected = probe.measure_rate(base, group, eta, budget=1e-5)
        probe.config = replace(probe.config, kl_probe="finite-difference")  # which reads responses in other blocks
        assert probe.measure_rate(probe.open(group, eta), group, eta, budget=1e-5) == pytest.approx(expected, rel=0.01)
