"""The engine's gradient equals dense full-sequence autograd, parameter by parameter, however the tokens are cut.

One process, Megatron's own modules on both sides; float64 to 1e-12 over all parameters together, float32 to 2e-5.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.grpo.model_provider import build_conventional_model
from megatron.grpo.presets import get_preset
from tests.support.dense import compare_gradients, dense_gradients
from tests.support.models import (
    build_pair, dense_of, draw_group, get_pair, get_small_hybrid, one_rank, replay_gradients,
)

FLOAT64_BAR, FLOAT32_BAR = 1e-12, 2e-5


def check(pair, group, *, bar=FLOAT64_BAR, together=1, temperature=1.0, **config):
    """The engine against the dense pass; every single parameter is held too, ten times looser."""
    loss, found = replay_gradients(pair.engine(temperature=temperature, **config), group.tree(together=together))
    expected_loss, expected = dense_of(pair, group, temperature=temperature)
    total, single = compare_gradients(found, expected)
    worst = max(single, key=single.get)
    assert total <= bar, (total, worst, single[worst])
    assert single[worst] <= 10 * bar, (worst, single[worst])
    assert abs(loss - expected_loss) <= bar * max(1.0, abs(expected_loss))
    return found


SIZES = [  # prompt, chunk, block
    (1, 1, 8), (1, 200, 64), (2, 1, 1), (12, 1, 64), (43, 7, 3), (64, 64, 64), (157, 64, 8), (157, 200, 64),
]


@pytest.mark.parametrize("prompt, chunk, block", SIZES)
def test_any_sizes_of_a_hybrid(prompt, chunk, block):
    pair = get_small_hybrid()
    group = draw_group(prompt, (5, 17, 1), pair.vocab_size)
    check(pair, group, prompt_chunk_size=chunk, response_block_size=block)


@pytest.mark.parametrize("prompt, chunk, block", [(1, 7, 3), (30, 7, 2)])
def test_a_hybrid_that_ends_in_a_gated_delta_net(prompt, chunk, block):
    """The last layer of a prompt's chunk stops once its state is captured: here that layer is recurrent."""
    pair = get_small_hybrid(num_layers=3)
    check(pair, draw_group(prompt, (4, 1), pair.vocab_size), prompt_chunk_size=chunk, response_block_size=block)


@pytest.mark.parametrize("preset", ["tiny-qwen3.6", "tiny-llama", "tiny-qwen3"])
def test_presets_in_float64(preset):
    """GDN with an output gate and zero-centred norms; tied embeddings; q and k norms."""
    pair = get_pair(preset)
    check(pair, draw_group(157, (5, 17, 1), pair.vocab_size), prompt_chunk_size=43)


@pytest.mark.parametrize("preset", ["tiny-qwen3.6", "tiny-llama", "tiny-qwen3"])
def test_presets_in_float32(preset):
    pair = get_pair(preset, torch.float32)
    check(pair, draw_group(157, (5, 17, 1), pair.vocab_size, seed=1), bar=FLOAT32_BAR, prompt_chunk_size=43)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_engine_is_as_precise_as_conventional_training(dtype):
    """Error against float64 at most twice that of a dense pass of the conventional model in the same dtype."""
    pair = get_pair("tiny-qwen3.6", dtype)
    group = draw_group(61, (9, 4), pair.vocab_size)
    _, found = replay_gradients(pair.engine(), group.tree())
    conventional = build_conventional_model(
        pair.preset, pair.preset.transformer_config(use_cpu_initialization=True), one_rank(), flash=True
    ).to(dtype)
    conventional.load_state_dict(pair.plain.state_dict())
    _, plain = dense_gradients(conventional, group.sequences())
    oracle = dense_of(pair, group)[1]
    assert compare_gradients(found, oracle)[0] <= 2 * compare_gradients(plain, oracle)[0]


def test_biases_of_queries_keys_and_values():
    preset = replace(get_preset("tiny-llama"), num_layers=2, qkv_bias=True)
    pair = build_pair(preset, torch.float64, one_rank())
    assert "decoder.layers.0.self_attention.linear_qkv.bias" in dict(pair.model.named_parameters())
    check(pair, draw_group(21, (4, 2), pair.vocab_size))


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_temperature(temperature):
    pair = get_small_hybrid()
    check(pair, draw_group(20, (6, 3), pair.vocab_size), temperature=temperature)


@pytest.mark.parametrize("rows", [1, 5])
def test_queries_gathered_a_few_rows_at_a_time(rows):
    pair = get_small_hybrid()
    check(pair, draw_group(30, (9, 1), pair.vocab_size), query_rows_at_once=rows, attention_output_residency="host")


@pytest.mark.parametrize("tokens", [1, 5])
def test_vocabulary_projected_a_few_tokens_at_a_time(tokens):
    pair = get_small_hybrid()
    check(pair, draw_group(20, (9, 1), pair.vocab_size), logprob_chunk_tokens=tokens)


@settings(max_examples=8, deadline=None)
@given(
    prompt=st.integers(1, 40), responses=st.lists(st.integers(1, 9), min_size=1, max_size=3), chunk=st.integers(1, 50),
    block=st.integers(1, 10), rows=st.integers(1, 50), kept=st.sampled_from(["none", "host", "device"]),
    pages=st.sampled_from(["device", "host"]),
)
def test_random_sizes(prompt, responses, chunk, block, rows, kept, pages):
    pair = get_small_hybrid()
    check(
        pair, draw_group(prompt, tuple(responses), pair.vocab_size), prompt_chunk_size=chunk, response_block_size=block,
        query_rows_at_once=rows, attention_output_residency=kept, page_residency=pages,
    )


def test_gradients_accumulate_over_groups():
    """Two prompts one after another, without clearing in between: the sum of their gradients."""
    pair = get_small_hybrid()
    groups = [draw_group(length, (5, 2), pair.vocab_size, seed=length) for length in (12, 21)]
    engine = pair.engine()
    _, first = replay_gradients(engine, groups[0].tree())
    for name, parameter in pair.model.named_parameters():
        parameter.grad = first[name]
    pair.model.zero_grad = lambda: None  # replay_gradients would clear
    try:
        _, both = replay_gradients(engine, groups[1].tree())
    finally:
        del pair.model.zero_grad
        pair.model.zero_grad()
    parts = [dense_of(pair, group)[1] for group in groups]
    assert compare_gradients(both, {name: parts[0][name] + parts[1][name] for name in both})[0] <= FLOAT64_BAR
