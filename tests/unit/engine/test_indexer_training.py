"""The indexer's loss under replay: the engine's gradient equals dense autograd of the same loss on Megatron's DSAttention.

One process; float64 to 1e-12 over the main parameters together, and over the indexers' alone.
"""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw.adapters import latent_attention
from longstraw.adapters.latent_attention import LatentAttentionAdapter
from longstraw.prompt_state.latents import IndexView
from tests.support.dense import compare_gradients, constant_prompt, take_gradients
from tests.support.indexer import dense_as_megatron, dense_with_indexer
from tests.support.latent_models import small_latent, small_preset
from tests.support.models import (
    build_pair, draw_document, draw_group, get_preset, lift_float64, one_rank, replay_gradients, replay_in_one_go,
)

C = 0.7
PLACES = ("device", "host")


def split(grads):
    """(those of indexers, the others)."""
    return tuple({n: g for n, g in grads.items() if (".indexer." in n) == inside} for inside in (True, False))


def assert_equal(found, expected, bar=1e-12):
    for part, reference in zip(split(found), split(expected)):
        if max(g.abs().max() for g in reference.values()) < 1e-14:  # one selected key teaches nothing
            assert max(g.abs().max() for g in part.values()) < 1e-14
            continue
        total, single = compare_gradients(part, reference)
        worst = max(single, key=single.get)
        assert total <= bar and single[worst] <= 10 * bar, (total, worst, single[worst])


_oracles = {}


def oracle(pair, group, coefficient=C):
    key = (id(pair), group.prompt.shape[1], tuple(map(len, group.responses)), coefficient)
    if key not in _oracles:
        with lift_float64():
            _oracles[key] = dense_with_indexer(pair.plain, group.sequences(), coefficient, vocab_size=pair.vocab_size)
    return _oracles[key]


def check(pair, group, *, together=1, bar=1e-12, **config):
    engine = pair.engine(**config)
    loss, found = replay_gradients(engine, group.tree(together=together))
    expected_loss, expected_added, expected = oracle(pair, group)
    assert_equal(found, expected, bar)
    assert abs(loss - expected_loss) <= bar * max(1.0, abs(expected_loss))
    assert abs(engine.auxiliary_loss - expected_added) <= 1e-9 * expected_added + bar  # Megatron cuts log p at 1e-10
    return found


@pytest.mark.parametrize("prompt, chunk, block", [
    (1, 200, 3), (2, 1, 1), (5, 2, 8), (6, 7, 8), (43, 16, 3), (157, 43, 64),
])
def test_any_sizes(prompt, chunk, block):
    """Prompts shorter and longer than the 5 selected keys, blocks on both sides of that."""
    pair = small_latent(indexer_loss=C)
    check(pair, draw_group(prompt, (5, 8, 1), pair.vocab_size), prompt_chunk_size=chunk, response_block_size=block)


@pytest.mark.parametrize("change", [
    dict(dsa_indexer_topk=1000), dict(dsa_indexer_topk=1), dict(num_layers=3), dict(dsa_indexer_topk_freq=1),
    dict(num_layers=5, dsa_indexer_topk_freq=4, dsa_indexer_skip_topk_offset=3),
], ids=str)
def test_other_selections(change):
    """All keys, one key, a last layer that computes, no sharing, GLM's own sharing."""
    pair = small_latent(indexer_loss=C, **change)
    check(pair, draw_group(30, (6, 1), pair.vocab_size), prompt_chunk_size=8)


@settings(max_examples=5, deadline=None)
@given(
    prompt=st.integers(1, 40), responses=st.lists(st.integers(1, 9), min_size=1, max_size=3), chunk=st.integers(1, 50),
    block=st.integers(1, 10), rows=st.integers(1, 50), kept=st.sampled_from(["none", *PLACES]),
    selections=st.sampled_from(["none", *PLACES]), pages=st.sampled_from(PLACES), index=st.sampled_from(PLACES),
    adjoints=st.sampled_from(PLACES),
)
def test_random_sizes(prompt, responses, chunk, block, rows, kept, selections, pages, index, adjoints):
    pair = small_latent(indexer_loss=C)
    check(
        pair, draw_group(prompt, tuple(responses), pair.vocab_size), prompt_chunk_size=chunk, response_block_size=block,
        query_rows_at_once=rows, attention_output_residency=kept, selection_residency=selections, page_residency=pages,
        index_page_residency=index, adjoint_residency=adjoints,
    )


def test_one_against_four_at_a_time():
    """Micro-batches change nothing."""
    pair = small_latent(indexer_loss=C)
    group = draw_group(14, (6, 6, 6, 6), pair.vocab_size)
    for together in (1, 2, 4):
        check(pair, group, together=together, response_block_size=4)


def test_scored_and_replayed_in_one_go():
    pair = small_latent(indexer_loss=C)
    group = draw_group(30, (9, 1), pair.vocab_size)
    engine = pair.engine(selection_residency="device", response_block_size=4)
    with lift_float64():
        replay_in_one_go(engine, group.tree())
    assert_equal(take_gradients(engine.model), oracle(pair, group)[2])


def test_experts():
    """A dense layer and two with experts, of which the first uses the dense layer's selection."""
    preset = replace(
        get_preset("tiny-glm5.2"), num_layers=3, moe_layer_freq=(0, 1, 1), dsa_indexer_topk_freq=2,
        dsa_indexer_skip_topk_offset=1,
    )
    pair = build_pair(preset, torch.float64, one_rank(), indexer_loss=C)
    check(pair, draw_group(43, (5, 17, 1), pair.vocab_size))


def test_float32():
    pair = build_pair(small_preset(), torch.float32, one_rank(), indexer_loss=C)
    check(pair, draw_group(43, (9, 1), pair.vocab_size, seed=1), bar=5e-5)


def test_megatrons_own_training_path():
    """A document whose every row weighs 1: the loss that Megatron adds to a training pass, by its own backward."""
    pair = small_latent(indexer_loss=C)
    document = replace(draw_document(41, pair.vocab_size), weights=torch.ones(40, dtype=torch.float64))
    engine = pair.engine(response_block_size=8)
    _, found = replay_gradients(engine, document.tree())
    with lift_float64():
        expected = dense_as_megatron(pair.plain, *document.sequences(), C, pair.vocab_size)
    assert_equal(found, expected)
    with lift_float64():
        _, added, again = dense_with_indexer(pair.plain, document.sequences(), C, vocab_size=pair.vocab_size)
    assert_equal(again, expected)
    assert abs(engine.auxiliary_loss - added) <= 1e-9 * added


@pytest.mark.parametrize("prompt", [1, 30])
def test_response_only(prompt):
    """Index keys of the prompt are constants."""
    pair = small_latent(indexer_loss=C)
    group = draw_group(prompt, (6, 6), pair.vocab_size)
    engine = pair.engine(semantics="response_only", response_block_size=4)
    _, found = replay_gradients(engine, group.tree(together=2))
    with lift_float64(), constant_prompt(pair.plain, prompt - 1):
        *_, expected = dense_with_indexer(
            pair.plain, group.sequences(), C, constant=prompt - 1, vocab_size=pair.vocab_size
        )
    assert_equal(found, expected)


def test_the_main_gradient_is_the_frozen_indexers():
    """The loss touches the indexer's parameters alone, to the bit."""
    frozen, trained = small_latent(), small_latent(indexer_loss=C)
    group = draw_group(43, (5, 1), frozen.vocab_size)
    (_, a), (_, b) = (replay_gradients(pair.engine(), group.tree()) for pair in (frozen, trained))
    assert all(torch.equal(grad, split(b)[1][name]) for name, grad in split(a)[1].items())
    assert not any(grad.count_nonzero() for grad in split(a)[0].values())
    assert all(grad.count_nonzero() for grad in split(b)[0].values())


@pytest.mark.parametrize("semantics", ["exact", "response_only"])
def test_coefficient_zero_gives_zeros(semantics):
    """A trainable indexer without a loss: every gradient is a tensor of zeros, never None."""
    pair = build_pair(small_preset(), torch.float64, one_rank())
    indexer = {n: p for n, p in pair.model.named_parameters() if ".indexer." in n}
    for parameter in indexer.values():
        parameter.requires_grad_(True)
    engine = pair.engine(semantics=semantics)
    with lift_float64():
        engine.replay(draw_group(20, (6, 1), pair.vocab_size).tree())
    assert len(indexer) == 10 and all(p.grad is not None and not p.grad.count_nonzero() for p in indexer.values())
    assert engine.auxiliary_loss == 0.0


def test_responses_without_weight_give_zeros():
    pair = small_latent(indexer_loss=C)
    group = draw_group(20, (6, 1), pair.vocab_size)
    group = replace(group, weights=tuple(map(torch.zeros_like, group.weights)))
    with lift_float64():
        pair.model.zero_grad()
        pair.engine().replay(group.tree())
    grads = [p.grad for n, p in pair.model.named_parameters() if ".indexer." in n]
    assert all(g is not None and not g.count_nonzero() for g in grads)
    pair.model.zero_grad()


def test_row_weights_are_wanted():
    pair = small_latent(indexer_loss=C)
    tree = draw_group(20, (6,), pair.vocab_size).tree()
    tree.children[0].row_weights = None
    with pytest.raises(ValueError, match="--dsa-indexer-loss-coeff 0.7 needs row weights in segment response0"):
        pair.engine().replay(tree)


def test_the_ledger_knows_the_adjoints():
    """Of index pages, of layers that compute a selection, where --adjoint-residency says; none of a constant prompt."""
    pair = small_latent(indexer_loss=C)
    for semantics in ("exact", "response_only"):
        engine = pair.engine(prompt_chunk_size=8, adjoint_residency="host", index_page_residency="host", semantics=semantics)
        tree, seen = draw_group(30, (7,), pair.vocab_size).tree(), []
        loss = tree.children[0].loss
        tree.children[0].loss = lambda *args: seen.append(engine.ledger.entries()) or loss(*args)
        replay_gradients(engine, tree)
        assert engine.ledger.entries() == []
        found = {
            (e.layer_number, e.rows, e.bytes, e.residency) for e in seen[0] if (e.segment, e.kind) == ("prompt", "index_adjoint")
        }
        foreseen = {(e.layer_number, e.rows, e.bytes, e.residency) for e in engine.foresee_state(30) if e.kind == "index_adjoint"}
        assert found == foreseen
        assert found == ({(n, 29, 29 * 8 * 8, "host") for n in (1, 3)} if semantics == "exact" else set())


def drop_adjoints(patch):
    nowhere = torch.zeros(1, 100, 8, dtype=torch.float64)
    patch.setattr(IndexView, "adjoint", lambda view: nullcontext(nowhere[:, : view.rows]))


def take_late_roots_only(patch):
    """Own index keys get what their own block gives them, and nothing of later ones."""
    original = LatentAttentionAdapter._index_roots

    def roots(self, run, segment, start):
        (keys, grad), *others = original(self, run, segment, start)
        return [(keys, torch.zeros_like(grad) if run.index_grads is None else run.index_grads.k), *others]

    patch.setattr(LatentAttentionAdapter, "_index_roots", roots)


def weigh_all_rows_alike(patch):
    original = LatentAttentionAdapter._row_weights

    def weights(self, segment, block):
        found = original(self, segment, block)
        return found.mean().expand_as(found).contiguous()

    patch.setattr(LatentAttentionAdapter, "_row_weights", weights)


def take_target_of_all_keys(patch):
    original = latent_attention.differentiate_indexer

    def differentiate(*args):
        main = args[3]
        return original(*args[:3], replace(main, lse=main.lse + 0.01 * torch.arange(main.lse.shape[1])[:, None]), *args[4:])

    patch.setattr(latent_attention, "differentiate_indexer", differentiate)


@pytest.mark.parametrize("break_it", [drop_adjoints, take_late_roots_only, weigh_all_rows_alike, take_target_of_all_keys])
def test_the_comparison_sees_it(monkeypatch, break_it):
    """Break one step at a time: the indexers' parameters must show it."""
    pair = small_latent(indexer_loss=C)
    group = draw_group(43, (5, 3), pair.vocab_size)
    with monkeypatch.context() as patch:
        break_it(patch)
        _, found = replay_gradients(pair.engine(), group.tree())
    assert compare_gradients(split(found)[0], split(oracle(pair, group)[2])[0])[0] > 1e-4
