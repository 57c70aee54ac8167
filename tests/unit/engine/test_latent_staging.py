"""What is on the device of a model whose whole state lives on the host, at every moment of a step: read off the ledger.

tiny-glm5.2: latents in all layers, index keys in those that select, adjoints of latents. At most two layers of pages are
staged, and beside them one layer's sums for adjoints; of graphs there is one block's.
"""

import gc
from contextlib import contextmanager

import pytest

from longstraw.adapters.base import LayerRun
from longstraw.prompt_state.pages import PageArena
from tests.support.models import draw_group, get_pair, replay_gradients

ON_HOST = dict(
    page_residency="host", index_page_residency="host", adjoint_residency="host", selection_residency="host",
    attention_output_residency="host",
)


def watch(monkeypatch, engine) -> list:
    """The ledger's entries after each copy to the device, and while adjoints are summed there."""
    seen, staging = [], engine.policy.staging
    prefetch, adding = staging.prefetch, PageArena.adding

    def watched_prefetch(*args):
        prefetch(*args)
        seen.append(engine.ledger.entries())

    @contextmanager
    def watched_adding(arena, *args):
        with adding(arena, *args) as sums:
            seen.append(engine.ledger.entries())
            yield sums
            seen.append(engine.ledger.entries())

    monkeypatch.setattr(staging, "prefetch", watched_prefetch)
    monkeypatch.setattr(PageArena, "adding", watched_adding)
    return seen


def staged_layers(entries, kind: str = "staged") -> dict[int, int]:
    """layer -> bytes of it on the device, though its home is the host."""
    found: dict[int, int] = {}
    for e in entries:
        if e.kind == kind:
            assert e.residency == "device"
            found[e.layer_number] = found.get(e.layer_number, 0) + e.bytes
    return found


def hosted_bytes(entries, suffix: str) -> dict[int, int]:
    """layer -> bytes of its pages, or adjoints, of all segments on the host."""
    found: dict[int, int] = {}
    for e in entries:
        if e.kind.endswith(suffix) and not e.kind.startswith("staged"):
            assert e.residency == "host", e
            found[e.layer_number] = found.get(e.layer_number, 0) + e.bytes
    return found


@pytest.mark.parametrize("semantics", ["exact", "response_only"])
def test_at_most_two_layers_and_one_layers_sums_are_on_the_device(monkeypatch, semantics):
    pair = get_pair("tiny-glm5.2")
    engine = pair.engine(semantics=semantics, response_block_size=4, **ON_HOST)
    seen = watch(monkeypatch, engine)
    replay_gradients(engine, draw_group(43, (7, 5), pair.vocab_size).tree())
    most, sums = set(), set()
    for entries in seen:
        staged, pages = staged_layers(entries), hosted_bytes(entries, "_pages")
        assert len(staged) <= 2 and all(staged[layer] <= pages[layer] for layer in staged), staged
        summed, adjoints = staged_layers(entries, "staged_adjoint"), hosted_bytes(entries, "_adjoint")
        assert len(summed) <= 1 and all(summed[layer] <= adjoints[layer] for layer in summed), summed
        most.add(len(staged))
        sums |= summed.keys()
    assert max(most) == 2 and {entry.layer_number for entries in seen for entry in entries if entry.kind == "staged"} == set(
        range(1, 9)
    )
    assert sums == set(range(1, 9)), "every layer's adjoints are summed on the device at some moment"
    assert engine.ledger.entries() == []


def test_a_third_layer_would_be_seen(monkeypatch):
    """The control: with room for three, the ledger shows three."""
    pair = get_pair("tiny-glm5.2")
    engine = pair.engine(**ON_HOST)
    engine.policy.staging.limit = 3
    seen = watch(monkeypatch, engine)
    replay_gradients(engine, draw_group(43, (5,), pair.vocab_size).tree())
    assert max(len(staged_layers(entries)) for entries in seen) == 3


def test_one_blocks_graph_beside_them():
    """When a loss is taken the only runs alive, which hold a block's graph, are those of its own block."""
    pair = get_pair("tiny-glm5.2")
    engine = pair.engine(response_block_size=2, **ON_HOST)
    tree, alive = draw_group(20, (6, 4), pair.vocab_size).tree(), []
    for child in tree.children:
        child.loss = lambda logprobs, columns, loss=child.loss: alive.append(
            sum(issubclass(type(o), LayerRun) for o in gc.get_objects())
        ) or loss(logprobs, columns)
    gc.collect()
    gc.disable()
    try:
        replay_gradients(engine, tree)
    finally:
        gc.enable()
    assert alive == [len(engine.adapters)] * 5 and len(engine.adapters) == 8 + 7
