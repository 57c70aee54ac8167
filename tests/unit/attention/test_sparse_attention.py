"""Attention over selected latents, block by block over pages on one rank, against the naive form; float64.

Outputs, log-sum-exps and every gradient, those that reach earlier pages through their adjoints included.
"""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw.attention import sparse
from longstraw.attention.latent import attend_latents, latent_attention
from longstraw.attention.layout import BlockLayout, plan_blocks
from longstraw.attention.naive_sparse import naive_expanded_attention, naive_sparse_attention
from longstraw.attention.selection import SelectionGeometry, select
from longstraw.attention.sparse import LatentGeometry
from tests.support.errors import relative_error
from tests.support.latents import LatentCase, TensorPages, Walk, check_walk


def draw(*shape, seed, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def check(case: LatentCase, cut: Walk, unit: int = 1):
    plan = [
        plan_blocks(start, length, cut.block, 1, 0, unit, None)
        for start, length in ((0, case.shared), (case.shared, case.own))
    ]
    check_walk(case, cut, plan)


@pytest.mark.parametrize("shared, own", [(0, 1), (1, 1), (9, 6), (20, 1), (0, 13)])
@pytest.mark.parametrize("top_k", [1, 4, 50])
def test_blocks_over_pages(shared, own, top_k):
    check(LatentCase(shared, own, top_k=top_k), Walk(block=4))


@pytest.mark.parametrize("batch", [2, 3])
def test_a_batch_shares_pages_of_batch_one(batch):
    """The shared pages' adjoints are the sum over the batch; each member selects for itself."""
    check(LatentCase(9, 6, batch, top_k=3), Walk(block=4))


def test_ties_everywhere():
    case = LatentCase(20, 9, 2, top_k=5, quantum=2.0)
    scores = case.draw()
    assert (scores["index_q"] == 0).double().mean() > 0.3
    check(case, Walk(block=6, reselect=True))


@pytest.mark.parametrize("cut", [
    Walk(block=5, dense=True), Walk(block=5, dense=True, kept=True), Walk(block=5), Walk(block=5, kept=True, reselect=True),
], ids=str)
def test_all_keys_selected_is_dense_attention(cut):
    check(LatentCase(12, 9, 2, top_k=100), cut)


@settings(max_examples=25, deadline=None)
@given(
    shared=st.integers(0, 14), own=st.integers(1, 9), batch=st.integers(1, 3), top_k=st.integers(1, 20),
    relu=st.booleans(), quantum=st.sampled_from([None, 0.7, 2.0]), block=st.integers(1, 8), unit=st.integers(1, 3),
    rows=st.integers(1, 9), elements=st.integers(1, 200), kept=st.booleans(), reselect=st.booleans(),
)
def test_any_sizes(shared, own, batch, top_k, relu, quantum, block, unit, rows, elements, kept, reselect):
    case = LatentCase(shared, own, batch, top_k, relu, quantum, seed=shared + own)
    cut = Walk(block, rows, elements, elements, elements, kept=kept, reselect=reselect)
    check(case, cut, unit)


def test_a_later_token_changes_nothing_before_it():
    case = LatentCase(0, 8, top_k=3)
    t, outputs = case.draw(), []
    for change in (0.0, 5.0):
        for name, dim in (("latents", 1), ("index_k", 1), ("q", 2), ("index_q", 2), ("weights", 2)):
            t[name].select(dim, 5).add_(change)
        geometry = SelectionGeometry(BlockLayout(0, 8), 3, True, 4096, ())
        selection = select(t["index_q"], t["weights"], t["index_k"], geometry)
        o, _ = attend_latents(t["q"], t["latents"], selection, LatentGeometry(geometry.layout, 0.4, 7, 4096, ()))
        outputs.append(o)
    assert torch.equal(outputs[0][:, :, :5], outputs[1][:, :, :5])
    assert not torch.isclose(outputs[0][:, :, 5], outputs[1][:, :, 5]).any()


def test_absorbed_queries_equal_keys_and_values_per_head():
    """q absorbed into the latents' space and values projected afterwards, against a key and a value per head."""
    heads, tokens, latent, rotary, nope, out = 3, 9, 7, 4, 5, 6
    q, q_rotary = draw(2, heads, tokens, nope, seed=1), draw(2, heads, tokens, rotary, seed=2)
    latents = draw(2, tokens, latent + rotary, seed=3)
    up_k, up_v = draw(heads, nope, latent, seed=4), draw(heads, out, latent, seed=5)
    index_q, weights, index_k = draw(2, 2, tokens, 4, seed=6), draw(2, 2, tokens, seed=7), draw(2, tokens, 4, seed=8)
    layout = BlockLayout(0, tokens)
    selection = select(index_q, weights, index_k, SelectionGeometry(layout, 3, True, 4096, ()))
    mask = torch.zeros(2, tokens, tokens, dtype=torch.bool)
    rows = selection.parts[0][0]
    for i, s, _ in (rows >= 0).nonzero().tolist():
        mask[i, s, rows[i, s][rows[i, s] >= 0].long()] = True
    absorbed = torch.cat([torch.einsum("bhse,hev->bhsv", q, up_k), q_rotary], -1)
    o, _ = attend_latents(absorbed, latents, selection, LatentGeometry(layout, 0.4, latent, 4096, ()))
    found = torch.einsum("bhsv,hfv->bhsf", o, up_v)
    torch.testing.assert_close(found, naive_expanded_attention(q, q_rotary, latents, up_k, up_v, mask, 0.4))


def open_block(top_k=4, dtype=torch.float64, tokens=33, earlier=60, batch=2):
    """(q, own latents, selection, geometry) of a block over one page of `earlier` rows with zero adjoints."""
    width, layout = 10, BlockLayout(earlier, tokens)
    pages = TensorPages(draw(1, earlier, width, seed=1, dtype=dtype), torch.arange(earlier), rows_of_ranks=(earlier,))
    pages.grad = torch.zeros(1, earlier, width, dtype=torch.promote_types(dtype, torch.float32))
    index = TensorPages(draw(1, earlier, 6, seed=2, dtype=dtype), torch.arange(earlier))
    selection = select(
        draw(batch, 2, tokens, 6, seed=3, dtype=dtype), draw(batch, 2, tokens, seed=4, dtype=dtype),
        draw(batch, tokens, 6, seed=5, dtype=dtype), SelectionGeometry(layout, top_k, True, 4096, (index,)),
    )
    q, latents = draw(batch, 3, tokens, width, seed=6, dtype=dtype), draw(batch, tokens, width, seed=7, dtype=dtype)
    geometry = LatentGeometry(layout, 0.4, 7, 4096, (pages,))
    return q.requires_grad_(), latents.requires_grad_(), selection, geometry


@pytest.mark.parametrize("sparse_path", [True, False])
def test_constant_pages_get_no_adjoint(sparse_path):
    q, latents, selection, geometry = open_block()
    pages = geometry.history[0]
    pages.constant = True
    latent_attention(q, latents, selection if sparse_path else None, geometry).sum().backward()
    assert not pages.grad.any() and q.grad.any() and latents.grad.any()


def test_kept_outputs_skip_the_forward(monkeypatch):
    q, latents, selection, geometry = open_block()
    kept, grads = attend_latents(q.detach(), latents.detach(), selection, geometry), []
    for pair in (None, kept):
        geometry.history[0].grad.zero_()
        with monkeypatch.context() as patch:
            if pair is not None:
                patch.setattr(sparse, "attend_rows", None)  # calling it would raise
            out = latent_attention(q, latents, selection, geometry, pair)
        grads.append([*torch.autograd.grad(out.sum(), (q, latents)), geometry.history[0].grad.clone()])
    assert all(map(torch.equal, *grads))


def test_wrong_kept_outputs_change_the_gradient():
    """The control of the test above: kept outputs are really used, on both paths."""
    q, latents, selection, geometry = open_block()
    for chosen in (selection, None):
        o, lse = attend_latents(q.detach(), latents.detach(), chosen, geometry)
        right, wrong = (
            torch.autograd.grad((latent_attention(q, latents, chosen, geometry, pair) ** 2).sum(), q)[0]
            for pair in ((o, lse), (o, lse + 1))
        )
        assert relative_error([wrong], [right]) > 0.1


def test_the_autograd_node_holds_no_graph():
    """Dropping a block's output frees it without the garbage collector: nothing in the node points back."""
    q, latents, selection, geometry = open_block()
    gc.collect()
    gc.disable()
    try:
        hidden = q * 1.0
        out = latent_attention(hidden, latents, selection, geometry)
        seen = weakref.ref(hidden), weakref.ref(out.grad_fn)
        del hidden, out
        assert [ref() for ref in seen] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sparse_path", [True, False])
def test_narrow_dtypes_keep_wide_partials(dtype, sparse_path):
    """Error against float64 at most twice that of plain PyTorch in the same dtype; adjoints in float32."""
    q, latents, selection, geometry = open_block(top_k=9, dtype=dtype)
    pages, do = geometry.history[0], draw(2, 3, 33, 7, seed=8, dtype=dtype)
    mask = torch.arange(93) <= 60 + torch.arange(33)[:, None]
    mask = mask.expand(2, -1, -1).clone()
    if sparse_path:
        mask.zero_()
        for rows, offset in zip(selection.parts[0], (0, 60)):
            for i, s, _ in (rows >= 0).nonzero().tolist():
                mask[i, s, offset + rows[i, s][rows[i, s] >= 0].long()] = True
    out = latent_attention(q, latents, selection if sparse_path else None, geometry)
    out.backward(do)
    found = [out.detach(), q.grad, latents.grad, pages.grad]

    def plain(cast):
        leaves = [t.detach().to(cast).requires_grad_() for t in (q, latents, pages.tensor)]
        keys = torch.cat([leaves[2].expand(2, -1, -1), leaves[1]], 1)
        y, _ = naive_sparse_attention(leaves[0], keys, mask, 7, 0.4)
        y.backward(do.to(cast))
        return [y.detach(), *(t.grad for t in leaves)]

    oracle = plain(torch.float64)
    assert pages.grad.dtype is torch.float32
    assert relative_error(found, oracle) <= 2 * relative_error(plain(dtype), oracle)
