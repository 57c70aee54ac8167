"""The ledger's answers: what is resident, where, whose, and that what is freed is gone from them."""

import gc

import pytest
import torch

from longstraw.prompt_state.kept import KeptOutputs
from longstraw.prompt_state.ledger import Ledger, LedgerEntry, storage_bytes
from longstraw.prompt_state.pages import PageArena
from longstraw.prompt_state.recurrent import GatedDeltaState, RecurrentStates
from longstraw.prompt_state.residency import Staging

CPU = torch.device("cpu")


def watched_state(residency="device", adjoint_residency="device"):
    """A ledger over one attention layer and one GDN layer with state in them."""
    ledger = Ledger()
    pages = PageArena(
        segment="prompt", layer_number=4, owner=1, capacity=10, residency=residency,
        adjoint_residency=adjoint_residency, staging=Staging(CPU),
    )
    states = RecurrentStates(segment="prompt", layer_number=1, owner=1)
    kept = KeptOutputs(segment="prompt", layer_number=4, owner=1, residency="host")
    for owner in (pages, states, kept):
        ledger.watch(owner)
    return ledger, pages, states, kept


def fill(pages, states, kept):
    k = torch.ones(1, 2, 6, 8, dtype=torch.bfloat16)
    pages.append(k, k)
    states.keep(1, GatedDeltaState(torch.ones(1, 2, 4, 4), torch.ones(1, 8, 3, dtype=torch.bfloat16)))
    kept.keep(0, torch.ones(1, 4, 6, 8, dtype=torch.bfloat16), torch.ones(1, 4, 6))


def test_nothing_is_resident_before_anything_ran():
    assert watched_state()[0].entries() == []


def test_entries_name_what_is_resident():
    ledger, *owners = watched_state(adjoint_residency="host")
    fill(*owners)
    owners[0].open_adjoints(CPU)
    owners[1].add_adjoint(owners[1].at(1))
    assert ledger.entries() == [
        LedgerEntry("conv_state", "prompt", 1, 1, 0, 8 * 3 * 2, "device"),
        LedgerEntry("gdn_adjoint", "prompt", 1, 1, 0, (2 * 4 * 4 + 8 * 3) * 4, "device"),
        LedgerEntry("recurrent_state", "prompt", 1, 1, 0, 2 * 4 * 4 * 4, "device"),
        LedgerEntry("attention_output", "prompt", 4, 1, 6, 4 * 6 * (8 * 2 + 4), "host"),
        LedgerEntry("kv_adjoint", "prompt", 4, 1, 6, 2 * 2 * 10 * 8 * 4, "host"),
        LedgerEntry("kv_pages", "prompt", 4, 1, 6, 2 * 2 * 10 * 8 * 2, "device"),
    ]


def test_totals_by_any_fields():
    ledger, *owners = watched_state(residency="host")
    fill(*owners)
    owners[0].read(6)
    totals = ledger.bytes_by("kind", "residency")
    assert totals[("kv_pages", "host")] == 2 * 2 * 10 * 8 * 2
    assert totals[("staged", "device")] == 2 * 2 * 6 * 8 * 2
    assert ledger.bytes_by("owner") == {(1,): sum(totals.values())}
    with pytest.raises(AttributeError):
        ledger.bytes_by("colour")


def test_freed_state_is_gone_from_the_answers():
    """The ledger holds no reference: dropping the owner drops its entries at once, without the collector."""
    ledger, *owners = watched_state()
    fill(*owners)
    gc.disable()
    try:
        del owners
        assert ledger.entries() == []
    finally:
        gc.enable()


def test_bytes_are_those_of_the_whole_storage():
    assert storage_bytes(torch.zeros(10, 4)[2:3]) == 160


@pytest.mark.parametrize("residency", ["host", "device"])
def test_kept_outputs_are_taken_once(residency):
    kept = KeptOutputs(segment="prompt", layer_number=1, owner=0, residency=residency)
    o, lse = torch.randn(1, 2, 3, 4, requires_grad=True) * 1, torch.randn(1, 2, 3)
    kept.keep(2, o, lse)
    found = kept.take(2, CPU)
    assert torch.equal(found[0], o) and torch.equal(found[1], lse) and found[0].grad_fn is None
    assert kept.take(2, CPU) is None and kept.ledger_entries() == []


def test_kept_outputs_of_residency_none_are_not_kept():
    kept = KeptOutputs(segment="prompt", layer_number=1, owner=0, residency="none")
    kept.keep(0, torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3))
    assert kept.take(0, CPU) is None and kept.ledger_entries() == []
