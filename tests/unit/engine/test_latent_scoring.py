"""Latent attention in the forward sweep: log-probabilities bit for bit those of the replay, and rollouts token by token."""

import pytest
import torch

from longstraw.rollout.config import SamplingConfig
from longstraw.rollout.resident import decode_group
from longstraw.segments import Segment, prompt_segment, response_segment
from tests.support.latent_models import small_latent
from tests.support.models import draw_group, lift_float64, replay_gradients


@pytest.mark.parametrize("places", [("none", "none"), ("host", "none"), ("none", "device"), ("host", "host")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_first_ratio_is_exactly_one(dtype, places):
    """A selection that was made again, or attention outputs that were computed again, are the same bits."""
    pair = small_latent(dtype)
    engine = pair.engine(
        response_block_size=4, attention_output_residency=places[0], selection_residency=places[1]
    )
    tree, seen = draw_group(29, (6, 6, 6), pair.vocab_size).tree(together=3), {}
    (child,) = tree.children
    original = child.loss
    child.loss = lambda logprobs, columns: seen.update({(columns.start, columns.stop): logprobs.detach()}) or original(
        logprobs, columns
    )
    with lift_float64():
        state, _ = engine.forward_sweep(tree, None)
        _, scored = engine.forward_sweep(child, state)
    replay_gradients(engine, tree)
    assert sorted(seen) == [(0, 4), (4, 6)]
    for (start, stop), logprobs in seen.items():
        assert torch.equal(logprobs, scored[:, start:stop])


@pytest.mark.parametrize("prompt_length", [1, 3, 30])
def test_decoded_tokens_score_as_in_a_forward_sweep(prompt_length):
    """Token by token, in a batch that shrinks as responses stop, over shared index keys and latents and its own."""
    pair = small_latent()
    engine = pair.engine()
    prompt = draw_group(prompt_length, (1,), pair.vocab_size).prompt
    with lift_float64():
        state, _ = engine.forward_sweep(prompt_segment(prompt), None)
        samples = decode_group(
            engine, prompt, state, group_size=6, config=SamplingConfig(max_response_length=12),
            stop_ids=frozenset(range(6)), generator=torch.Generator().manual_seed(1),
        )
        lengths = [len(sample.token_ids) for sample in samples]
        assert sorted(lengths)[2] < max(lengths), (lengths, "three have to stop first, so that the batch shrinks")
        for sample in samples:
            response = torch.tensor([sample.token_ids])
            _, scored = engine.forward_sweep(response_segment("again", prompt, response), state)
            torch.testing.assert_close(scored[0], torch.tensor(sample.logprobs, dtype=torch.float64), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block", [1, 4, 64])
def test_a_later_token_leaves_earlier_ones_alone(block):
    """Of 12 tokens with 5 selected keys each: another token 5 changes what follows from it, and nothing before."""
    pair = small_latent()
    engine, tokens = pair.engine(response_block_size=block), draw_group(13, (1,), pair.vocab_size).prompt
    inputs, targets, scored = tokens[:, :-1].clone(), tokens[:, 1:], []
    for token in (inputs[0, 5].item(), (inputs[0, 5].item() + 1) % pair.vocab_size):
        inputs[0, 5] = token
        with lift_float64():
            scored.append(engine.forward_sweep(Segment("document", inputs.clone(), targets), None)[1])
    torch.testing.assert_close(scored[0][:, :5], scored[1][:, :5], rtol=1e-13, atol=1e-13)
    assert ((scored[0] - scored[1])[:, 5:].abs() > 1e-6).all()
