"""Responses replayed together, prefixes that some of them share, and documents one after another."""

import dataclasses

import pytest
import torch

from longstraw.segments import Segment
from tests.support.dense import Sequence, compare_gradients, dense_gradients
from tests.support.models import (
    Group, dense_of, draw_document, draw_group, get_small_hybrid, lift_float64, replay_gradients, weighted_loss,
)

EIGHT = (6,) * 8


@pytest.mark.parametrize("together", [1, 3, 8])
def test_the_gradient_does_not_depend_on_how_many_are_replayed_at_a_time(together):
    pair = get_small_hybrid()
    group = draw_group(25, EIGHT, pair.vocab_size)
    _, found = replay_gradients(pair.engine(response_block_size=4), group.tree(together=together))
    assert compare_gradients(found, dense_of(pair, group)[1])[0] <= 1e-12


def test_shorter_responses_padded_into_a_batch():
    """Tokens after a response's end, with weight 0, change nothing."""
    pair = get_small_hybrid()
    group = draw_group(19, (6, 3, 1), pair.vocab_size)
    pad = lambda t, value: torch.nn.functional.pad(t, (0, 6 - len(t)), value=value)  # noqa: E731
    padded = dataclasses.replace(
        group, responses=tuple(pad(r, 7) for r in group.responses), weights=tuple(pad(w, 0) for w in group.weights)
    )
    _, found = replay_gradients(pair.engine(response_block_size=4), padded.tree(together=3))
    assert compare_gradients(found, dense_of(pair, group)[1])[0] <= 1e-12


class SavedBytes:
    """Peak bytes of tensors that autograd has saved and not yet freed, while it is the context."""

    def __init__(self):
        self.now = self.peak = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor)

    def _pack(self, tensor):
        return _Held(tensor.detach(), self)  # an output that its own node saves would otherwise be a cycle

    def __enter__(self):
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc):
        self._hooks.__exit__(*exc)


class _Held:
    def __init__(self, tensor, count):
        self.tensor, self.count, self.bytes = tensor, count, tensor.numel() * tensor.element_size()
        count.now += self.bytes
        count.peak = max(count.peak, count.now)

    def __del__(self):
        self.count.now -= self.bytes


def saved_peak(pair, responses, together):
    group = draw_group(25, (6,) * responses, pair.vocab_size)
    with SavedBytes() as saved:
        replay_gradients(pair.engine(), group.tree(together=together))
    assert saved.now == 0, "saved tensors outlive the sweep"
    return saved.peak


def test_saved_activations_do_not_depend_on_the_group_size():
    pair = get_small_hybrid()
    assert saved_peak(pair, 2, together=1) == saved_peak(pair, 8, together=1)
    assert saved_peak(pair, 8, together=8) > saved_peak(pair, 8, together=1)


def test_saved_activations_do_not_depend_on_the_prompt_length():
    """The live graph is a block: a prompt three times as long saves no more at its peak than its pages' growth."""
    pair = get_small_hybrid(num_layers=1, linear_attention_freq=2)  # one recurrent layer: no page that is saved for backward
    peaks = []
    for length in (33, 97):
        with SavedBytes() as saved:
            replay_gradients(pair.engine(), draw_group(length, (6,), pair.vocab_size).tree())
        peaks.append(saved.peak)
    assert peaks[0] == peaks[1]


def branch(inputs, children=(), name="prefix", loss=None, targets=None):
    return Segment(name, inputs, targets, loss, list(children))


def draw(length, seed, vocab=32):
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed))


def draw_loss(length, seed):
    return torch.randn(length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def leaf(last, response, weights, name="response"):
    """A response after a parent whose last token `last` was held back."""
    inputs = torch.cat([last, response[:-1]])[None]
    return Segment(name, inputs, response[None], weighted_loss(weights[None]))


def whole(path, response, weights):
    tokens = torch.cat([*path, response])[None]
    return Sequence(tokens, torch.cat([torch.zeros(tokens.shape[1] - 1 - len(weights), dtype=torch.float64), weights]))


def check_tree(pair, tree, sequences, **config):
    _, found = replay_gradients(pair.engine(prompt_chunk_size=7, response_block_size=4, **config), tree)
    with lift_float64():
        _, expected = dense_gradients(pair.plain, sequences)
    assert compare_gradients(found, expected)[0] <= 1e-12


@pytest.mark.parametrize("residency", ["device", "host"])
def test_a_prefix_that_some_responses_share(residency):
    """prompt -> (prefix -> two responses, one response): the prefix's adjoint is differentiated once for both."""
    pair = get_small_hybrid()
    prompt, prefix = draw(18, 0), draw(10, 1)
    responses, weights = [draw(n, 10 + n) for n in (6, 1, 9)], [draw_loss(n, n) for n in (6, 1, 9)]
    shared = branch(
        torch.cat([prompt[-1:], prefix[:-1]])[None],
        [leaf(prefix[-1:], r, w) for r, w in zip(responses[:2], weights[:2])],
    )
    tree = branch(prompt[None, :-1], [shared, leaf(prompt[-1:], responses[2], weights[2])], name="prompt")
    sequences = [whole([prompt, prefix], r, w) for r, w in zip(responses[:2], weights[:2])]
    sequences.append(whole([prompt], responses[2], weights[2]))
    check_tree(pair, tree, sequences, page_residency=residency, adjoint_residency=residency)


def test_prefixes_below_prefixes_and_an_empty_one():
    pair = get_small_hybrid()
    prompt, first, second = draw(9, 0), draw(5, 1), draw(8, 2)
    response, weights = draw(5, 3), draw_loss(5, 4)
    inner = branch(torch.cat([first[-1:], second[:-1]])[None], [leaf(second[-1:], response, weights)], name="second")
    empty = branch(torch.zeros(1, 0, dtype=torch.long), [inner], name="empty")
    outer = branch(torch.cat([prompt[-1:], first[:-1]])[None], [empty], name="first")
    tree = branch(prompt[None, :-1], [outer], name="prompt")
    check_tree(pair, tree, [whole([prompt, first, second], response, weights)])


def test_a_prefix_with_a_loss_of_its_own():
    """A turn that is trained and continued: loss and children on one segment, in a batch of two."""
    pair = get_small_hybrid()
    prompt, turns, replies = draw(11, 0), [draw(6, 1), draw(6, 2)], [draw(4, 3), draw(4, 4)]
    turn_weights, reply_weights = [draw_loss(6, 5), draw_loss(6, 6)], [draw_loss(4, 7), draw_loss(4, 8)]
    inputs = torch.stack([torch.cat([prompt[-1:], turn[:-1]]) for turn in turns])
    after = Segment(
        "reply", torch.stack([torch.cat([t[-1:], r[:-1]]) for t, r in zip(turns, replies)]), torch.stack(replies),
        weighted_loss(torch.stack(reply_weights)),
    )
    turn = branch(inputs, [after], name="turn", targets=torch.stack(turns), loss=weighted_loss(torch.stack(turn_weights)))
    tree = branch(prompt[None, :-1], [turn], name="prompt")
    sequences = [
        whole([prompt, t], r, torch.cat([tw, rw]))
        for t, r, tw, rw in zip(turns, replies, turn_weights, reply_weights)
    ]
    check_tree(pair, tree, sequences)


def test_documents_one_after_another_leave_nothing_to_each_other():
    """Documents of 37, 51 and 40 tokens through one engine: bit for bit the outputs and gradients of separate runs."""
    pair = get_small_hybrid()
    shared = pair.engine(response_block_size=16)
    for document in [draw_document(length, pair.vocab_size) for length in (37, 51, 40)]:
        results = []
        for engine in (shared, pair.engine(response_block_size=16)):
            with lift_float64():
                _, logprobs = engine.forward_sweep(document.tree(), None)
            results.append((logprobs, *replay_gradients(engine, document.tree())))
        (logprobs, loss, grads), (own_logprobs, own_loss, own_grads) = results
        assert torch.equal(logprobs, own_logprobs) and loss == own_loss
        assert all(torch.equal(grads[name], own_grads[name]) for name in grads)
        with lift_float64():
            _, expected = dense_gradients(pair.plain, document.sequences())
        assert compare_gradients(grads, expected)[0] <= 1e-12


def test_a_group_whose_members_differ_from_each_other_only_by_weight():
    """Equal responses with opposite weights cancel exactly in the loss and to rounding in the gradient."""
    pair = get_small_hybrid()
    group = draw_group(12, (5,), pair.vocab_size)
    twice = Group(group.prompt, group.responses * 2, (group.weights[0], -group.weights[0]))
    loss, grads = replay_gradients(pair.engine(), twice.tree())
    _, single = replay_gradients(pair.engine(), group.tree())
    assert loss == 0
    for name, grad in grads.items():
        assert grad.norm() <= 1e-12 * single[name].norm(), name
