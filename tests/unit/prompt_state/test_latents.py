"""Latent and index pages, and kept selections: what is where, what adds up, and what the ledger says of it."""

import pytest
import torch

from longstraw.attention.selection import Selection
from longstraw.prompt_state.latents import IndexView, KeptSelections, LatentView
from longstraw.prompt_state.ledger import Ledger, LedgerEntry
from longstraw.prompt_state.pages import PageArena
from longstraw.prompt_state.residency import Staging

CPU = torch.device("cpu")
PLACES = ["device", "host"]


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def open_arena(kind, latents, *, staging=None, residency="device", adjoint_residency="device", layer_number=3):
    """An arena with one more row of room than `latents` [B, N, D] fill."""
    arena = PageArena(
        segment="prompt", layer_number=layer_number, owner=1, capacity=latents.shape[1] + 1, residency=residency,
        adjoint_residency=adjoint_residency, staging=staging or Staging(CPU), kind=kind,
    )
    arena.append(latents[:, None])
    return arena


@pytest.mark.parametrize("residency", PLACES)
def test_views_read_the_first_rows(residency):
    latents = draw(2, 5, 4)
    arena = open_arena("latent", latents, residency=residency)
    assert torch.equal(LatentView(arena, (3,)).read(), latents[:, :3])
    index = IndexView(open_arena("index", latents, residency=residency), (9, 2), rank=1, at=torch.arange(10, 15))
    assert torch.equal(index.read(), latents[:, :2]) and index.positions().tolist() == [10, 11]
    assert index.rows == 2 and index.batch == 2


@pytest.mark.parametrize("adjoint_residency", PLACES)
@pytest.mark.parametrize("dtype, wide", [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_adjoints_add_up_in_place(adjoint_residency, dtype, wide):
    arena = open_arena("latent", draw(1, 4, 3, dtype=dtype), adjoint_residency=adjoint_residency)
    arena.open_adjoints(CPU)
    for rows in (4, 2):
        with LatentView(arena, (rows,)).adjoint() as sums:
            assert sums.shape == (1, rows, 3) and sums.dtype is wide
            sums.index_add_(1, torch.tensor([0, rows - 1, 0]), torch.ones(1, 3, 3, dtype=wide))
    (found,) = arena.adjoint(0, 4, CPU)
    assert found[0, 0, :, 0].tolist() == [4.0, 1.0, 0.0, 1.0]


def test_constant_pages_take_no_adjoint():
    arena = open_arena("latent", draw(1, 4, 3))
    with LatentView(arena, (4,), constant=True).adjoint() as sums:
        assert sums is None
    assert not arena.has_adjoints


def selection_of(*sizes):
    """One sub-block a size list, one source a size: [2, 3, L] rows that tell their place."""
    return Selection(tuple(
        tuple(torch.arange(6 * width, dtype=torch.int32).view(2, 3, width) + 100 * i for width in sources)
        for i, sources in enumerate(sizes)
    ))


@pytest.mark.parametrize("residency", PLACES)
def test_kept_selections_are_given_back_once(residency):
    kept, chosen = KeptSelections(segment="s", layer_number=1, owner=0, residency=residency), selection_of((4, 0), (2, 1))
    expected = [rows.clone() for rows in chosen.tensors()]
    kept.keep(7, chosen)
    for rows in chosen.tensors():
        rows.zero_()  # kept by value
    found = kept.take(7, CPU)
    assert [len(sources) for sources in found.parts] == [2, 2]
    assert all(map(torch.equal, found.tensors(), expected))
    assert kept.take(7, CPU) is None and kept.ledger_entries() == []


def test_nothing_is_kept_unless_asked():
    kept = KeptSelections(segment="s", layer_number=1, owner=0, residency="none")
    kept.keep(0, selection_of((4,)))
    assert kept.take(0, CPU) is None


def test_the_ledger_tells_latents_index_keys_and_selections_apart():
    ledger, staging = Ledger(), Staging(CPU)
    latents = open_arena("latent", draw(1, 5, 4, dtype=torch.bfloat16), staging=staging, residency="host")
    index = open_arena("index", draw(1, 5, 2, dtype=torch.bfloat16), staging=staging)
    kept = KeptSelections(segment="prompt", layer_number=3, owner=1, residency="host")
    for owner in (latents, index, kept):
        ledger.watch(owner)
    latents.open_adjoints(CPU)
    kept.keep(0, selection_of((4, 0)))
    kept.keep(1, selection_of((1,)))
    assert ledger.entries() == [
        LedgerEntry("index_pages", "prompt", 3, 1, 5, 6 * 2 * 2, "device"),
        LedgerEntry("latent_adjoint", "prompt", 3, 1, 5, 6 * 4 * 4, "device"),
        LedgerEntry("latent_pages", "prompt", 3, 1, 5, 6 * 4 * 2, "host"),
        LedgerEntry("selection", "prompt", 3, 1, 6, (2 * 3 * 4 + 2 * 3 * 1) * 4, "host"),
    ]


def test_two_layers_are_staged_with_all_their_pages():
    """Latents and index keys of a prompt and of a segment are four arenas a layer: they count as one layer."""
    staging = Staging(CPU)
    layers = {
        number: [open_arena("latent", draw(1, 3, 4), staging=staging, residency="host", layer_number=number) for _ in range(4)]
        for number in (1, 2, 3, 4)
    }
    seen = []
    for number, arenas in layers.items():
        for arena in layers.get(number + 1, []):
            arena.prefetch(3)
        for arena in arenas:
            copy = arena.read(3)[0]
            assert copy.data_ptr() == arena.read(3)[0].data_ptr(), "fetched twice"
        seen.append(sorted({n for n, held in layers.items() for arena in held if arena.id in staging.staged()}))
        assert len(staging.staged()) <= 8
    assert seen == [[1, 2], [2, 3], [3, 4], [3, 4]]
