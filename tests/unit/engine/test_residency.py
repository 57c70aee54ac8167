"""Where state lives changes no bit of the gradient, the ledger says where it is, and nothing outlives a sweep."""

import gc
import itertools

import pytest
import torch

from longstraw.adapters import full_attention
from longstraw.adapters.base import LayerRun
from tests.support.dense import compare_gradients
from tests.support.models import (
    dense_of, draw_document, draw_group, get_pair, get_small_hybrid, lift_float64, replay_gradients, replay_in_one_go,
)

PLACES = ("device", "host")


def test_every_residency_gives_the_same_bits():
    pair = get_small_hybrid()
    group = draw_group(14, (7, 1), pair.vocab_size)
    results = {}
    for pages, adjoints, kept in itertools.product(PLACES, PLACES, ("none", *PLACES)):
        engine = pair.engine(
            prompt_chunk_size=8, page_residency=pages, adjoint_residency=adjoints, attention_output_residency=kept,
            recurrent_state_residency=pages,
        )
        results[pages, adjoints, kept] = replay_gradients(engine, group.tree())
    loss, grads = results["device", "device", "none"]
    assert compare_gradients(grads, dense_of(pair, group)[1])[0] <= 1e-12
    for where, (other_loss, other) in results.items():
        assert loss == other_loss, where
        assert all(torch.equal(grads[name], other[name]) for name in grads), where


def entries_during_replay(pair, group, **config):
    """The ledger's entries whenever a response's loss is taken."""
    engine, tree, seen = pair.engine(prompt_chunk_size=8, response_block_size=4, **config), group.tree(), []
    for child in tree.children:
        child.loss = lambda logprobs, columns, loss=child.loss: seen.append(engine.ledger.entries()) or loss(logprobs, columns)
    replay_gradients(engine, tree)
    assert engine.ledger.entries() == [], "state outlives the sweep"
    return seen


@pytest.mark.parametrize("place", PLACES)
def test_the_ledger_says_what_is_where(place):
    pair = get_small_hybrid()
    group = draw_group(30, (7,), pair.vocab_size)
    seen = entries_during_replay(
        pair, group, page_residency=place, adjoint_residency=place, attention_output_residency=place,
        recurrent_state_residency=place,
    )
    for entries in seen:
        where = {entry.kind: entry.residency for entry in entries if entry.segment == "prompt"}
        assert where["kv_pages"] == where["kv_adjoint"] == where["attention_output"] == place
        assert where["recurrent_state"] == where["conv_state"] == place
        own = {entry.kind: entry.residency for entry in entries if entry.segment != "prompt"}
        assert own.get("recurrent_state", "device") == "device", "a response's boundaries are few and read at once"
        assert {e.layer_number for e in entries if e.kind == "kv_pages"} == {2, 4}
        assert {e.layer_number for e in entries if e.kind == "recurrent_state"} == {1, 3}
        pages = [e for e in entries if e.kind == "kv_pages" and e.segment == "prompt"]
        assert all(e.rows == 29 and e.owner == 0 and e.bytes == 2 * 29 * 16 * 8 for e in pages)


def test_at_most_two_layers_of_host_pages_are_staged():
    pair = get_pair("tiny-llama")  # four attention layers
    seen = entries_during_replay(pair, draw_group(30, (7, 6), pair.vocab_size), page_residency="host")
    staged = [{e.layer_number for e in entries if e.kind == "staged"} for entries in seen]
    assert all(1 <= len(layers) <= 2 for layers in staged), staged


@pytest.mark.parametrize("kept, passes", [("none", 4), ("host", 3)])
def test_host_pages_are_there_when_a_layer_wants_them(kept, passes):
    """Of each pass over a block at most the first layer's pages are fetched late; every other fetch, in the forward and in
    the backward, was announced. With kept outputs a replayed prompt chunk reads its pages in the backward only."""
    pair = get_pair("tiny-llama")
    engine = pair.engine(page_residency="host", attention_output_residency=kept)
    replay_gradients(engine, draw_group(30, (7, 6), pair.vocab_size).tree())
    staging = engine.policy.staging  # passes that read pages: the prompt's 2nd chunk, twice, and each response
    assert 1 <= staging.late <= passes and staging.fetched >= 20, (staging.late, staging.fetched)


def test_the_prompts_state_is_all_that_grows_with_the_prompt():
    """Per prompt token: two attention layers' keys and values; nothing else of the ledger grows but boundary states."""
    pair = get_small_hybrid()
    sizes = {}
    for length in (17, 33):
        entries = entries_during_replay(pair, draw_group(length, (4,), pair.vocab_size))[0]
        sizes[length] = {kind: sum(e.bytes for e in entries if e.kind == kind) for kind in {e.kind for e in entries}}
    grown = {kind: sizes[33][kind] - sizes[17][kind] for kind in sizes[33]}
    per_token = 2 * 16 * 8  # k and v, one group of 16 channels, float64
    assert grown["kv_pages"] == grown["kv_adjoint"] == 2 * 16 * per_token
    assert grown["recurrent_state"] == 2 * 2 * 4 * 8 * 8 * 8  # two more chunks, two layers, [4, 8, 8] float64 each


def test_a_constant_prompt_has_no_adjoints():
    """response_only holds no gradient of the prompt's state, of whatever kind, and pays no memory for it."""
    pair = get_small_hybrid()
    group = draw_group(30, (7, 6), pair.vocab_size)
    adjoints = {
        semantics: {
            entry.kind
            for entries in entries_during_replay(pair, group, semantics=semantics)
            for entry in entries
            if entry.segment == "prompt" and entry.kind.endswith("adjoint")
        }
        for semantics in ("exact", "response_only")
    }
    assert adjoints == {"exact": {"kv_adjoint", "gdn_adjoint"}, "response_only": set()}


def test_state_is_released_block_by_block():
    """While a document is differentiated from its end, pages and boundary states behind the block are given back."""
    pair = get_small_hybrid()
    engine, tree, seen = pair.engine(response_block_size=8), draw_document(41, pair.vocab_size).tree(), []
    original = tree.loss
    tree.loss = lambda logprobs, columns: seen.append(engine.ledger.entries()) or original(logprobs, columns)
    replay_gradients(engine, tree)
    rows = [{e.rows for e in entries if e.kind == "kv_pages"} for entries in seen]
    states = [sum(e.bytes for e in entries if e.kind == "recurrent_state") for entries in seen]
    assert rows == [{32}, {32}, {24}, {16}, {8}]  # five blocks: the last one's pages were never needed
    assert [n / states[-1] for n in states] == [4, 4, 3, 2, 1]


def live(kind):
    return [o for o in gc.get_objects() if issubclass(type(o), kind)]


@pytest.fixture
def no_collector():
    """Cycles stay where they are: whatever reference counting alone does not free is found."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


def graph_tensors():
    return [t for t in live(torch.Tensor) if t.grad_fn is not None]


def in_one_go(engine, tree):
    with lift_float64():
        replay_in_one_go(engine, tree)
    engine.model.zero_grad()


@pytest.mark.parametrize("replay", [replay_gradients, in_one_go])
@pytest.mark.parametrize("kept", ["none", "host"])
def test_no_graph_and_no_run_survives_a_sweep(no_collector, kept, replay):
    pair = get_small_hybrid()
    group = draw_group(20, (6, 1), pair.vocab_size)
    before = len(graph_tensors())
    engine = pair.engine(attention_output_residency=kept, response_block_size=4)
    replay(engine, group.tree())
    assert live(LayerRun) == []
    assert len(graph_tensors()) == before
    assert engine.ledger.entries() == []


def test_graphs_are_gone_block_by_block(no_collector):
    """When a loss is taken, the only runs alive are those of its own block."""
    pair = get_small_hybrid()
    engine, tree, alive = pair.engine(response_block_size=2), draw_group(9, (6, 4), pair.vocab_size).tree(), []
    for child in tree.children:
        child.loss = lambda logprobs, columns, loss=child.loss: alive.append(len(live(LayerRun))) or loss(logprobs, columns)
    replay_gradients(engine, tree)
    assert alive == [4] * 5


def test_a_cycle_through_the_autograd_node_would_be_seen(no_collector, monkeypatch):
    """The control: an autograd node whose geometry holds its block's run leaks every block, and the test above sees it."""
    pair = get_small_hybrid()
    original = full_attention.paged_attention

    def leaky(q, k, v, geometry, kept):
        run = next(a.module.run for a in engine.adapters if getattr(a.module.run, "k", None) is k)
        object.__setattr__(geometry, "run", run)
        run.output = (original(q, k, v, geometry, kept),)
        return run.output[0]

    monkeypatch.setattr(full_attention, "paged_attention", leaky)
    engine = pair.engine()
    replay_gradients(engine, draw_group(20, (6, 1), pair.vocab_size).tree())
    assert live(LayerRun)


def test_a_failing_loss_leaves_nothing_bound():
    """An exception in the middle of a replay: no module keeps a run, and the next replay is right."""
    pair = get_small_hybrid()
    group = draw_group(20, (6,), pair.vocab_size)
    engine, tree = pair.engine(), group.tree()

    def fail(logprobs, columns):
        raise RuntimeError("no reward")

    tree.children[0].loss = fail
    with pytest.raises(RuntimeError, match="no reward"):
        replay_gradients(engine, tree)
    assert all(adapter.module.run is None for adapter in engine.adapters)
    _, found = replay_gradients(engine, group.tree())
    assert compare_gradients(found, dense_of(pair, group)[1])[0] <= 1e-12
