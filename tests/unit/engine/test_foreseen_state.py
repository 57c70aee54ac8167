"""What the adapters foresee of a prompt's state is what its ledger holds when it is fullest."""

import pytest
import torch

from longstraw.prompt_state.capacity import explain_shortage
from longstraw.prompt_state.ledger import LedgerEntry
from tests.support.latent_models import small_latent
from tests.support.models import draw_group, get_pair, get_small_hybrid, replay_gradients


def bytes_by_kind(entries: list[LedgerEntry]) -> dict[tuple[str, int, str], int]:
    totals: dict[tuple[str, int, str], int] = {}
    for e in entries:
        key = (e.kind, e.layer_number, e.residency)
        totals[key] = totals.get(key, 0) + e.bytes
    return {key: size for key, size in totals.items() if size}


def fullest_state(engine, group) -> dict:
    """The prompt's entries while its last response is replayed: pages, adjoints and all that is kept."""
    tree, seen = group.tree(), {}
    last = tree.children[-1]
    original = last.loss

    def loss(logprobs, columns):
        if not seen:
            seen.update(bytes_by_kind([e for e in engine.ledger.entries() if e.segment == "prompt" and e.kind != "staged"]))
        return original(logprobs, columns)

    last.loss = loss
    replay_gradients(engine, tree)
    return seen


PLACES = dict(
    page_residency="host", index_page_residency="host", adjoint_residency="host", attention_output_residency="host",
    selection_residency="none", recurrent_state_residency="host",
)


@pytest.mark.parametrize("semantics", ["exact", "response_only"])
@pytest.mark.parametrize("places", [{}, PLACES], ids=["device", "host"])
@pytest.mark.parametrize("preset", ["small hybrid", "tiny-llama", "tiny-glm5.2", "tiny-qwen3-moe"])
def test_foreseen_bytes_are_those_of_the_ledger(preset, places, semantics):
    pair = get_small_hybrid() if preset == "small hybrid" else get_pair(preset)
    engine = pair.engine(semantics=semantics, **places)
    group = draw_group(38, (5, 3), pair.vocab_size)
    foreseen = bytes_by_kind(engine.foresee_state(38))
    assert foreseen == fullest_state(engine, group)
    assert foreseen and engine.ledger.entries() == []


def test_kept_selections_are_foreseen_roughly():
    """Which keys a rank's part of a selection holds depends on the scores: alone, a rank holds them all."""
    pair = get_pair("tiny-glm5.2")
    engine = pair.engine(selection_residency="host")
    group = draw_group(70, (5, 3), pair.vocab_size)
    foreseen, held = (
        sum(size for (kind, *_), size in found.items() if kind == "selection")
        for found in (bytes_by_kind(engine.foresee_state(70)), fullest_state(engine, group))
    )
    assert held and 0.5 < held / foreseen <= 1.5, (held, foreseen)


def test_nothing_is_allocated():
    """Two million tokens on a tiny model: far more than this process could hold twice."""
    engine = get_pair("tiny-llama").engine()
    total = sum(entry.bytes for entry in engine.foresee_state(2_000_000))
    assert total > 2_000_000 * 4 * 2 * 2 * 32 * 8 and torch.float64.itemsize == 8


@pytest.mark.parametrize("name", ["small hybrid", "latent, indexer trained", "tiny-qwen3-moe"])
def test_a_host_without_room_is_told_what_takes_each_kind_off_it(name):
    """Whatever the adapters put on the host, the refusal has a flag for it."""
    pairs = {"small hybrid": get_small_hybrid, "latent, indexer trained": lambda: small_latent(indexer_loss=0.7)}
    pair = pairs[name]() if name in pairs else get_pair(name)
    entries = pair.engine(**PLACES | dict(selection_residency="host")).foresee_state(100)
    kinds = {entry.kind for entry in entries if entry.residency == "host"}
    sentence = explain_shortage(entries, tokens=100, free=0, ranks=1)
    assert all(f" GiB {kind} (--" in sentence for kind in kinds) and len(kinds) >= 3
    assert name != "latent, indexer trained" or {"index_adjoint", "latent_adjoint", "selection"} <= kinds
