"""Sampling: greedy, truncation and frequencies against brute force; ties; determinism; bad input."""

import ast
import inspect
import math
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw.rollout.config import SamplingConfig
from longstraw.rollout.sampling import sample_tokens, sample_tokens_at, truncate


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def config(temperature=1.0, top_p=1.0, top_k=0):
    return SamplingConfig(sampling_temperature=temperature, sampling_top_p=top_p, sampling_top_k=top_k)


# Few distinct values, so that ties are common.
logit_rows = st.lists(st.integers(-4, 4).map(float) | st.just(-math.inf), min_size=1, max_size=12).filter(
    lambda row: max(row) > -math.inf
)


def kept_by_brute_force(row, top_k, top_p):
    """Token ids from the likeliest down, ties by id; the first top_k; then until their share reaches top_p."""
    order = [i for i in sorted(range(len(row)), key=lambda i: (-row[i], i)) if row[i] > -math.inf]
    order = order[:top_k] if top_k else order
    weights = [math.exp(row[i] - max(row)) for i in order]
    kept, share = [], 0.0
    for token, weight in zip(order, weights):
        if share >= top_p * sum(weights) - 1e-12:
            break
        kept.append(token)
        share += weight
    return set(kept)


@settings(max_examples=200, deadline=None)
@given(logit_rows, st.integers(0, 13), st.sampled_from([1e-9, 0.25, 0.5, 0.77, 0.95, 1.0]))
def test_truncation_equals_brute_force(row, top_k, top_p):
    (kept,) = truncate(torch.tensor([row]), top_k=top_k, top_p=top_p)
    assert set(kept.nonzero()[:, 0].tolist()) == kept_by_brute_force(row, top_k, top_p)


@settings(max_examples=50, deadline=None)
@given(logit_rows, st.integers(0, 1000))
def test_top_k_one_and_a_tiny_top_p_and_temperature_zero_are_greedy(row, seed):
    logits = torch.tensor([row])
    greedy = row.index(max(row))
    for settings in (config(top_k=1), config(top_p=1e-9), config(temperature=0.0), config(temperature=1e-38)):
        # A temperature near 0 shares its mass between equal maxima: only without ties is it greedy.
        if settings.sampling_temperature == 1e-38 and row.count(max(row)) > 1:
            continue
        sampled = sample_tokens(logits, settings, generator(seed))
        assert sampled.token_ids.tolist() == [greedy]
        assert sampled.sampling_logprobs.tolist() == [0.0]


@settings(max_examples=60, deadline=None)
@given(logit_rows, st.sampled_from([0.5, 1.0, 2.0]), st.integers(0, 4), st.sampled_from([0.6, 1.0]))
def test_uniform_numbers_map_to_tokens_by_the_cumulative_distribution(row, temperature, top_k, top_p):
    logits = torch.tensor([row], dtype=torch.float64)
    kept = sorted(kept_by_brute_force([x / temperature for x in row], top_k, top_p))
    weights = [math.exp((row[i] - max(row)) / temperature) for i in kept]
    everything = sum(math.exp((x - max(row)) / temperature) for x in row)
    for uniform in (0.0, 0.1, 0.37, 0.5, 0.83, 1 - 2**-53):
        position, below = 0, 0.0
        while position < len(kept) - 1 and uniform * sum(weights) >= below + weights[position]:
            below += weights[position]
            position += 1
        if min(abs(uniform * sum(weights) - below), abs(uniform * sum(weights) - below - weights[position])) < 1e-9:
            if 0.0 < uniform < 0.9:
                continue  # on an edge, where rounding decides
        sampled = sample_tokens_at(logits, config(temperature, top_p, top_k), torch.tensor([uniform], dtype=torch.float64))
        assert sampled.token_ids.item() == kept[position]
        assert sampled.logprobs.item() == pytest.approx(math.log(weights[position] / everything), abs=1e-12)
        assert sampled.sampling_logprobs.item() == pytest.approx(math.log(weights[position] / sum(weights)), abs=1e-12)


@pytest.mark.parametrize("settings", [config(), config(0.7), config(top_k=5), config(top_p=0.8), config(1.3, 0.9, 6)])
def test_frequencies_match_probabilities(settings):
    draws, vocab = 40_000, 12
    row = torch.randn(vocab, generator=generator(5)) * 1.5
    sampled = sample_tokens(row.expand(draws, vocab), settings, generator(6))
    kept = truncate(row[None] / settings.sampling_temperature, top_k=settings.sampling_top_k, top_p=settings.sampling_top_p)
    scaled = (row.double() / settings.sampling_temperature).masked_fill(~kept[0], -math.inf)
    expected = torch.softmax(scaled, 0) * draws
    counts = sampled.token_ids.bincount(minlength=vocab).double()
    assert (counts[expected == 0] == 0).all()
    live = expected > 0
    chi_square = ((counts - expected)[live] ** 2 / expected[live]).sum().item()
    freedom = int(live.sum()) - 1
    # 99.9 % point by Wilson and Hilferty's approximation.
    assert chi_square < freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    # And the logprobs are those of the tokens drawn.
    assert torch.allclose(sampled.sampling_logprobs.double(), (expected / draws).log()[sampled.token_ids], atol=1e-6)
    untruncated = torch.log_softmax(row / settings.sampling_temperature, 0)
    assert torch.allclose(sampled.logprobs, untruncated[sampled.token_ids], atol=1e-6)


def test_two_logprobs_are_equal_where_nothing_is_truncated():
    logits = torch.randn(6, 9, generator=generator(1))
    sampled = sample_tokens(logits, config(0.8), generator(2))
    assert torch.allclose(sampled.logprobs, sampled.sampling_logprobs, atol=1e-6)
    truncated = sample_tokens(logits, config(0.8, top_k=2), generator(2))
    assert (truncated.logprobs < truncated.sampling_logprobs).all()


def test_temperature_zero_reports_logprobs_at_temperature_one():
    logits = torch.randn(3, 5, generator=generator(1))
    sampled = sample_tokens(logits, config(0.0, top_k=2), generator())
    assert torch.equal(sampled.logprobs, torch.log_softmax(logits, -1).amax(-1))


def test_same_generator_state_gives_the_same_tokens():
    logits = torch.randn(64, 1000, generator=generator(3))
    for settings in (config(), config(0.9, 0.9, 50)):
        first = sample_tokens(logits, settings, generator(4))
        again = sample_tokens(logits.clone(), settings, generator(4))
        other = sample_tokens(logits, settings, generator(5))
        assert torch.equal(first.token_ids, again.token_ids) and torch.equal(first.logprobs, again.logprobs)
        assert not torch.equal(first.token_ids, other.token_ids)


def test_a_draw_takes_one_number_a_row_whatever_the_settings():
    """So a resumed or a greedy run keeps the generator in step."""
    states = []
    for settings in (config(), config(0.0), config(0.5, 0.3, 2)):
        for vocab in (3, 50):
            source = generator(7)
            sample_tokens(torch.zeros(4, vocab), settings, source)
            states.append(source.get_state())
    assert all(torch.equal(state, states[0]) for state in states)


def test_rows_do_not_disturb_each_other():
    logits = torch.randn(8, 30, generator=generator(8))
    uniforms = torch.rand(8, generator=generator(9), dtype=torch.float64)
    together = sample_tokens_at(logits, config(0.9, 0.9, 10), uniforms).token_ids
    alone = [sample_tokens_at(logits[i : i + 1], config(0.9, 0.9, 10), uniforms[i : i + 1]).token_ids for i in range(8)]
    assert torch.equal(together, torch.cat(alone))


def test_excluded_tokens_are_never_drawn():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 1.0, -math.inf]])
    for uniform in (0.0, 0.3, 1 - 2**-53):
        token = sample_tokens_at(logits, config(), torch.tensor([uniform], dtype=torch.float64)).token_ids.item()
        assert token in (1, 3)


def test_excluded_tokens_stay_out_where_rounding_leaves_top_p_unreached():
    logits = torch.randn(200, 40, generator=generator(10))
    logits[:, 1::2] = -math.inf
    logits[:, 0] = 0.0
    kept = truncate(logits, top_k=0, top_p=1 - 2**-53)
    assert not kept[:, 1::2].any()
    kept = truncate(logits, top_k=7, top_p=1 - 2**-53)
    assert (kept.sum(-1) <= 7).all() and not kept[:, 1::2].any()


def test_ties_at_the_edge_go_to_the_lowest_ids_in_a_large_vocabulary():
    logits = torch.zeros(2, 5000)
    for kept in (truncate(logits, top_k=100, top_p=1.0), truncate(logits, top_k=0, top_p=0.02 - 1e-9)):
        assert kept[:, :100].all() and not kept[:, 100:].any()


def test_no_rows():
    assert sample_tokens(torch.zeros(0, 5), config(), generator()).token_ids.shape == (0,)


@pytest.mark.parametrize(
    "logits, words",
    [
        (torch.tensor([[0.0, math.nan]]), "NaN"),
        (torch.tensor([[0.0, math.inf]]), "inf"),
        (torch.tensor([[0.0, 1.0], [-math.inf, -math.inf]]), "-inf throughout a row"),
        (torch.zeros(3), r"\[B, V\]"),
        (torch.zeros(1, 3, dtype=torch.bfloat16), "float32"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_refuses_logits_it_cannot_sample_from(logits, words, temperature):
    with pytest.raises(ValueError, match=words):
        sample_tokens(logits, config(temperature), generator())


@pytest.mark.parametrize(
    "settings, flag",
    [
        (dict(sampling_temperature=-0.1), "--sampling-temperature"),
        (dict(sampling_temperature=math.nan), "--sampling-temperature"),
        (dict(sampling_temperature=math.inf), "--sampling-temperature"),
        (dict(sampling_top_p=0.0), "--sampling-top-p"),
        (dict(sampling_top_p=1.1), "--sampling-top-p"),
        (dict(sampling_top_p=math.nan), "--sampling-top-p"),
        (dict(sampling_top_k=-1), "--sampling-top-k"),
        (dict(max_response_length=0), "--max-response-length"),
    ],
)
def test_config_refuses_values_out_of_range(settings, flag):
    with pytest.raises(ValueError, match=flag):
        SamplingConfig(**settings)


def test_every_config_field_has_help_that_argparse_can_print():
    body = ast.parse(inspect.getsource(SamplingConfig)).body[0].body
    helps = {
        field.target.id: text.value.value
        for field, text in zip(body, body[1:])
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    assert set(helps) == {field.name for field in fields(SamplingConfig)}
    assert not any("%" in text for text in helps.values())
