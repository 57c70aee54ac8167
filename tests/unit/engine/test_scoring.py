"""Log-probabilities of the forward sweep: those of the dense model, and bit for bit those of the replay."""

import pytest
import torch

from longstraw.adapters.decoder import last_token_logits
from longstraw.segments import Segment, own_columns
from tests.support.dense import take_gradients
from tests.support.models import (
    draw_group, get_pair, get_small_hybrid, lift_float64, replay_gradients, replay_in_one_go,
)


def replayed_and_scored(pair, together, *, temperature=1.0, lengths=(6, 6, 6), **config):
    """For each segment with a loss: log-probabilities seen by the loss in the replay, and of the forward sweep."""
    group = draw_group(29, lengths, pair.vocab_size)
    engine, tree = pair.engine(temperature=temperature, response_block_size=4, **config), group.tree(together=together)
    scored, seen = [], []
    with lift_float64():
        state, nothing = engine.forward_sweep(tree, None)
        assert nothing is None
        for child in tree.children:
            scored.append(engine.forward_sweep(child, state)[1])
    for child in tree.children:
        values = torch.full_like(scored[len(seen)], torch.nan)
        seen.append(values)

        def loss(logprobs, columns, original=child.loss, values=values):
            values[:, columns] = logprobs.detach()
            return original(logprobs, columns)

        child.loss = loss
    replay_gradients(engine, tree)
    return group, seen, scored


@pytest.mark.parametrize("kept", ["none", "host"])
@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_first_ratio_is_exactly_one(dtype, together, kept):
    """One update per batch: ratio exp(new - old) exactly 1, KL exactly 0, attention outputs kept or recomputed."""
    _, seen, scored = replayed_and_scored(get_pair("tiny-qwen3.6", dtype), together, attention_output_residency=kept)
    for new, old in zip(seen, scored, strict=True):
        assert torch.equal(new, old) and torch.equal((new - old).exp(), torch.ones_like(new))


def watch_losses(tree):
    """Every block's log-probabilities as the losses see them: (child, columns) -> values."""
    seen = {}
    for index, child in enumerate(tree.children):

        def loss(logprobs, columns, index=index, original=child.loss):
            seen[index, columns.start, columns.stop] = logprobs.detach().clone()
            return original(logprobs, columns)

        child.loss = loss
    return seen


@pytest.mark.parametrize("semantics", ["exact", "response_only"])
@pytest.mark.parametrize("together, block", [(1, 8), (1, 4), (3, 2)])
def test_scored_and_replayed_in_one_go(together, block, semantics):
    """A loss made from the response's own log-probabilities: the same bits as scoring first and replaying then."""
    pair = get_small_hybrid()
    group = draw_group(29, (6, 6, 6), pair.vocab_size)
    engine, tree = pair.engine(response_block_size=block, semantics=semantics), group.tree(together=together)
    expected_loss, expected = replay_gradients(engine, group.tree(together=together))
    seen = watch_losses(tree)
    with lift_float64():
        loss, scored = replay_in_one_go(engine, tree)
        state, _ = engine.forward_sweep(group.tree(together=together), None)
        again = [engine.forward_sweep(child, state)[1] for child in group.tree(together=together).children]
    found = take_gradients(pair.model)
    assert loss == pytest.approx(expected_loss, rel=1e-14)  # summed over the responses in another way
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert all(torch.equal(a, b) for a, b in zip(scored, again, strict=True))
    for (index, start, stop), values in seen.items():
        assert torch.equal(values, scored[index][:, start:stop])
    assert len(seen) == len(tree.children) * -(-6 // block)


def test_other_batch_shapes_agree_to_rounding_only():
    """Why the replay uses the scoring's batch: scored three at a time and replayed singly, the last bits may differ."""
    pair = get_pair("tiny-qwen3.6", torch.float32)
    _, _, together = replayed_and_scored(pair, 3)
    _, seen, _ = replayed_and_scored(pair, 1)
    torch.testing.assert_close(torch.cat(seen), torch.cat(together), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_the_dense_models(temperature):
    pair = get_small_hybrid()
    group, _, scored = replayed_and_scored(pair, 1, temperature=temperature, lengths=(6, 1, 9))
    for response, found in zip(group.responses, scored, strict=True):
        ids = torch.cat([group.prompt, response[None, :-1]], 1)
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)[None, None]
        with lift_float64(), torch.no_grad():
            logits = pair.plain(ids, None, mask)[0, -len(response) :] / temperature
        expected = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
        torch.testing.assert_close(found[0], expected, rtol=1e-11, atol=1e-11)


def test_logits_after_the_last_token():
    """What decoding samples from: the dense model's logits at the end, block by block."""
    pair = get_small_hybrid()
    tokens = draw_group(23, (1,), pair.vocab_size).prompt
    segment = Segment("text", tokens, tokens)  # targets only say that the last layer must not stop at its state
    engine = pair.engine(response_block_size=7)
    mask = torch.ones(23, 23, dtype=torch.bool).triu(1)[None, None]
    with lift_float64(), torch.no_grad():
        dense = pair.plain(tokens, None, mask)[0]
        state = engine.open_segment(segment, None)
        for block, layout in enumerate(state.plan):
            hidden = engine.run_forward(segment, state, block)
            logits = last_token_logits(pair.model, hidden, layout, pair.vocab_size)
            torch.testing.assert_close(logits[0], dense[own_columns(state, block).stop - 1], rtol=1e-11, atol=1e-11)
