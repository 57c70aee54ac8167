"""The ranks of `test_engine_attention.py`: exchanges and paged attention over several ranks, float64, no Megatron.

Every rank draws the whole sequence from one seed, works on its own part, and compares with the naive form on the whole.
"""

import torch
import torch.distributed as dist

from longstraw.attention.exchange import gather_rows, gather_tokens, merge_partials, scatter_rows
from longstraw.attention.layout import BlockLayout, plan_blocks
from longstraw.attention.naive import naive_attention
from longstraw.attention.geometry import AttentionGeometry
from longstraw.attention.paged import attend, paged_attention
from longstraw.prompt_state.pages import PageArena, PageView
from longstraw.prompt_state.residency import Staging
from tests.support.errors import relative_error
from tests.support.ranks import fork_ranks

HEADS, GROUPS, DIM, SCALE = 4, 2, 8, 0.4
CPU = torch.device("cpu")


def check_exchanges(rank, ranks):
    for rotation in range(ranks):
        layout = BlockLayout(7, 5, ranks, rank, rotation, 1, dist.group.WORLD)
        whole = torch.arange(2 * 3 * ranks * layout.rows * 4).double().view(2, 3, ranks * layout.rows, 4)
        own = slice(layout.slot * layout.rows, (layout.slot + 1) * layout.rows)
        assert torch.equal(gather_rows(whole[:, :, own], layout), whole), rotation

        partials = scatter_rows(whole * (rank + 1), layout)  # rank p computed (p + 1) times the whole for everyone
        factors = torch.arange(1, ranks + 1)[:, None, None, None, None]
        assert torch.equal(partials, whole[:, :, own] * factors), rotation

        # scatter is the transpose of gather: <gather(x), y> = sum over ranks of <x, sum of scatter(y)>
        y = torch.randn(whole.shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        x = torch.randn(whole[:, :, own].shape, generator=torch.Generator().manual_seed(90 + rank), dtype=torch.float64)
        products = torch.stack([(gather_rows(x, layout) * y).sum(), (x * scatter_rows(y, layout).sum(0)).sum()])
        dist.all_reduce(products)
        torch.testing.assert_close(products[0], products[1])

        tokens = torch.arange(2 * 5).double().view(2, 5)
        mine = tokens[:, layout.first : layout.first + layout.mine]
        assert torch.equal(gather_tokens(mine, layout), tokens), rotation


def check_merge(rank, ranks):
    """Each rank attends to its own keys; scatter and merge give each rank its own queries' whole result."""
    layout = BlockLayout(20, 2 * ranks, ranks, rank, 1, 1, dist.group.WORLD)
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, n, 8, generator=generator, dtype=torch.float64) for n in (2 * ranks, 9, 9))
    everywhere, keys = torch.full((2 * ranks,), 99), torch.arange(9)
    own = slice(min(4 * rank, 9), min(4 * rank + 4, 9))  # the last rank may own none
    o, lse = naive_attention(q, k[:, :, own], v[:, :, own], everywhere, keys[own], SCALE)
    parts = scatter_rows(torch.cat([o, lse[..., None]], -1), layout)
    merged, total = merge_partials(parts[..., :-1], parts[..., -1])
    expected = naive_attention(q, k, v, everywhere, keys, SCALE)
    rows = slice(layout.slot * 2, layout.slot * 2 + 2)
    assert relative_error([merged, total], [t[:, :, rows] for t in expected]) < 1e-14


def check_paged(rank, ranks, *, length, block_size, batch, unit, rows_at_once, residency, kept, exchange):
    """Blocks one after another over this rank's pages: every output and gradient against the whole sequence's."""
    generator = torch.Generator().manual_seed(length)

    def draw(batch_, heads):
        return torch.randn(batch_, heads, length, DIM, generator=generator, dtype=torch.float64)

    q, k, v, do = draw(batch, HEADS), draw(batch, GROUPS), draw(batch, GROUPS), draw(batch, HEADS)
    positions = torch.arange(length)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    expected, _ = naive_attention(*leaves, positions, positions, SCALE)
    expected.backward(do)

    plan = plan_blocks(0, length, block_size, ranks, rank, unit, dist.group.WORLD)
    arena = PageArena(
        segment="s", layer_number=1, owner=rank, capacity=sum(layout.mine for layout in plan), residency=residency,
        adjoint_residency="device", staging=Staging(CPU),
    )
    found, saved, ranks_rows = [], [], (0,) * ranks
    for layout in plan:
        at = layout.start + layout.slot * layout.rows
        rows = [
            torch.nn.functional.pad(t, (0, 0, 0, ranks * layout.rows))[:, :, at : at + layout.rows].clone()
            for t in (q, do)
        ]
        rows[1][:, :, layout.mine :] = 0
        own = slice(layout.start + layout.first, layout.start + layout.first + layout.mine)
        block = [rows[0].requires_grad_(), *(t[:, :, own].clone().requires_grad_() for t in (k, v))]
        view = PageView(arena, ranks_rows, rank)
        assert view.rows == arena.rows
        geometry = AttentionGeometry(layout, SCALE, rows_at_once, (view,), exchange)
        o, lse = attend(*(t.detach() for t in block), geometry)
        assert o.isfinite().all()
        saved.append((geometry, block, rows[1], own, (o, lse) if kept else None))
        found.append((o[:, :, : layout.mine], expected[:, :, own].detach()))
        arena.append(block[1], block[2])
        ranks_rows = tuple(rows + layout.tokens_of(r) for r, rows in enumerate(ranks_rows))
    arena.open_adjoints(CPU)
    for geometry, block, do_rows, own, pair in reversed(saved):  # last to first, keys with their pages' adjoints
        mine, start = geometry.layout.mine, geometry.history[0].rows
        out = paged_attention(*block, geometry, pair)
        dk, dv = arena.adjoint(start, start + mine, CPU)
        torch.autograd.backward([out, block[1], block[2]], [do_rows, dk.clone(), dv.clone()])
        arena.release(start)
        found.append((block[0].grad[:, :, :mine], leaves[0].grad[:, :, own]))
        found += [(b.grad, leaf.grad[:, :, own]) for b, leaf in zip(block[1:], leaves[1:])]
    for part, whole in found:
        torch.testing.assert_close(part, whole, rtol=1e-10, atol=1e-12)


def main(rank, ranks, _):
    check_exchanges(rank, ranks)
    check_merge(rank, ranks)
    sizes = dict(length=23, block_size=7, batch=2, unit=1, rows_at_once=100, residency="device", kept=False)
    for change in (
        {}, dict(block_size=1), dict(block_size=23), dict(block_size=2, unit=2), dict(block_size=5, unit=3),
        dict(rows_at_once=1), dict(rows_at_once=2, kept=True), dict(residency="host"), dict(length=1, block_size=4),
        dict(length=2, block_size=1, kept=True), dict(length=64, block_size=16, batch=1),
    ):
        for exchange in ("queries", "keys") if change else ("queries", "keys", "auto"):
            check_paged(rank, ranks, **sizes | change, exchange=exchange)


if __name__ == "__main__":
    fork_ranks(main)
