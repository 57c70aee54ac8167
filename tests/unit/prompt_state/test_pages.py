"""Pages and their adjoints: append and release move a watermark; host pages are staged, at most two layers' at a time."""

import pytest
import torch

from longstraw.prompt_state.ledger import Ledger
from longstraw.prompt_state.pages import PageArena, PageView
from longstraw.prompt_state.residency import Staging

CPU = torch.device("cpu")


def draw(rows, batch=1, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, 2, rows, 4, generator=generator).to(dtype) for _ in range(2)]


def open_arena(capacity, *, layer_number=1, staging=None, residency="device", adjoint_residency="device"):
    return PageArena(
        segment="prompt", layer_number=layer_number, owner=0, capacity=capacity, residency=residency,
        adjoint_residency=adjoint_residency, staging=staging or Staging(CPU),
    )


@pytest.mark.parametrize("residency", ["device", "host"])
def test_appended_pages_are_read_back(residency):
    arena = open_arena(9, residency=residency)
    pieces = [draw(rows, seed=rows) for rows in (4, 0, 3, 2)]
    for k, v in pieces:
        arena.append(k, v)
    k, v = arena.read(arena.rows)
    assert arena.rows == 9
    assert torch.equal(k, torch.cat([p[0] for p in pieces], 2)) and torch.equal(v, torch.cat([p[1] for p in pieces], 2))
    assert torch.equal(arena.read(5)[0], k[:, :, :5])


def test_one_buffer_serves_all_blocks():
    """Appending moves the watermark inside one allocation."""
    arena = open_arena(6)
    arena.append(*draw(2))
    first = arena.tensors[0].data_ptr()
    arena.append(*draw(4))
    assert arena.tensors[0].data_ptr() == first and arena.tensors[0].shape[2] == 6


def test_more_rows_than_the_capacity_are_refused():
    arena = open_arena(3, layer_number=7)
    arena.append(*draw(2))
    with pytest.raises(ValueError, match="layer 7: 4 rows do not fit into pages of 3"):
        arena.append(*draw(2))
    assert arena.rows == 2


def test_appended_tensors_leave_no_graph():
    """The arena copies values: neither the block's graph nor its tensors live on in it."""
    arena = open_arena(4)
    k, v = (t.requires_grad_() for t in draw(4))
    arena.append(k * 2, v * 2)
    assert not arena.tensors[0].requires_grad and arena.tensors[0].grad_fn is None
    expected = arena.tensors[0].clone()
    with torch.no_grad():
        k.zero_()
    assert torch.equal(arena.tensors[0], expected)


@pytest.mark.parametrize("residency", ["device", "host"])
def test_released_rows_are_overwritten_not_remembered(residency):
    """After a release the next block's rows are read, not a stale staged copy of the dropped ones."""
    arena = open_arena(6, residency=residency)
    arena.append(*draw(2))
    arena.append(*draw(2, seed=1))
    arena.read(4)
    arena.release(2)
    new = draw(2, seed=2)
    arena.append(*new)
    k, v = arena.read(4)
    assert torch.equal(k[:, :, 2:], new[0]) and torch.equal(v[:, :, 2:], new[1])


@pytest.mark.parametrize("residency", ["device", "host"])
@pytest.mark.parametrize("dtype, wide", [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_adjoints_accumulate_wide(residency, dtype, wide):
    arena = open_arena(5, adjoint_residency=residency)
    arena.append(*draw(5, dtype=dtype))
    arena.open_adjoints(CPU)
    expected = torch.zeros(1, 2, 5, 4, dtype=wide)
    for rows, seed in ((5, 1), (3, 2), (0, 3), (5, 4)):
        dk, dv = draw(rows, seed=seed, dtype=dtype)
        arena.add_adjoint(5 - rows, dk, dv)
        expected[:, :, 5 - rows :] += dk
    assert arena.adjoints[0].dtype is wide
    assert torch.equal(arena.adjoint(0, 5, CPU)[0], expected)
    assert torch.equal(arena.adjoint(2, 4, CPU)[0], expected[:, :, 2:4])


def test_many_small_adjoints_are_not_lost():
    """1000 additions of 2**-9 to 1 in bf16 pages: a bf16 sum would stay at 1."""
    arena = open_arena(1)
    arena.append(*draw(1, dtype=torch.bfloat16))
    arena.open_adjoints(CPU)
    arena.add_adjoint(0, torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4))
    small = torch.full((1, 2, 1, 4), 2.0**-9, dtype=torch.bfloat16)
    for _ in range(1000):
        arena.add_adjoint(0, small, small)
    torch.testing.assert_close(arena.adjoints[0], torch.full_like(arena.adjoints[0], 1 + 1000 * 2.0**-9))


def test_opening_adjoints_twice_keeps_them():
    arena = open_arena(2)
    arena.append(*draw(2))
    arena.open_adjoints(CPU)
    arena.add_adjoint(0, *draw(2))
    before = arena.adjoints[0].clone()
    arena.open_adjoints(CPU)
    assert torch.equal(arena.adjoints[0], before)


def test_empty_pages_have_adjoints():
    """A rank that owns no token opens adjoints like the others, so that all ranks build the same graph."""
    arena = open_arena(0)
    arena.append(*draw(0))
    arena.open_adjoints(CPU)
    dk, dv = arena.adjoint(0, 0, CPU)
    assert dk.shape == dv.shape == (1, 2, 0, 4)


def test_constant_views_add_nothing():
    arena = open_arena(3)
    arena.append(*draw(3))
    arena.open_adjoints(CPU)
    PageView(arena, (3,), constant=True).add_adjoint(*draw(3))
    assert not arena.adjoints[0].any()
    PageView(arena, (2,)).add_adjoint(*draw(2))
    assert arena.adjoints[0][:, :, :2].any() and not arena.adjoints[0][:, :, 2:].any()


def test_selected_members_keep_their_pages():
    arena = open_arena(3, residency="host")
    k, v = draw(3, batch=4)
    arena.append(k, v)
    arena.read(3)
    arena.select_batch(torch.tensor([2, 0]))
    assert torch.equal(arena.read(3)[0], k[[2, 0]]) and torch.equal(arena.read(3)[1], v[[2, 0]])


def test_at_most_two_layers_are_staged():
    """Host pages of six layers read in turn, the next one prefetched: the ledger never shows more than two copies."""
    ledger, staging = Ledger(), Staging(CPU)
    arenas = [open_arena(4, layer_number=n, staging=staging, residency="host") for n in range(1, 7)]
    for arena in arenas:
        ledger.watch(arena)
        arena.append(*draw(4, seed=arena.layer_number))
    seen = []
    for arena, following in zip(arenas, [*arenas[1:], None]):
        if following is not None:
            following.prefetch(4)
        assert torch.equal(arena.read(4)[0], arena.tensors[0])
        seen.append([e.layer_number for e in ledger.entries() if e.kind == "staged"])
    assert seen == [[1, 2], [2, 3], [3, 4], [4, 5], [5, 6], [5, 6]]


def test_staged_copies_are_copies_on_the_device():
    staging = Staging(CPU)
    arena = open_arena(4, staging=staging, residency="host")
    arena.append(*draw(4))
    k, _ = arena.read(4)
    assert k.data_ptr() != arena.tensors[0].data_ptr()
    assert arena.read(4)[0].data_ptr() == k.data_ptr(), "read again without another copy"
    assert arena.read(3)[0].shape[2] == 3, "another number of rows is another copy"
    assert staging.staged() == {arena.id: 2 * 2 * 3 * 4 * 4}


def test_device_pages_are_not_copied():
    staging = Staging(CPU)
    arena = open_arena(4, staging=staging)
    arena.append(*draw(4))
    arena.prefetch(4)
    assert arena.read(2)[0].data_ptr() == arena.tensors[0].data_ptr() and staging.staged() == {}
