"""The indexer's loss, block by block over pages on one rank, against autograd of the naive form; float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw.attention import indexer_loss
from longstraw.attention.indexer_loss import (
    IndexerLossGeometry, MainAttention, differentiate_indexer, score_rows, score_rows_bwd, target_rows,
)
from longstraw.attention.layout import BlockLayout, plan_blocks
from longstraw.attention.naive_sparse import naive_indexer_loss, naive_scores, naive_sparse_attention
from longstraw.attention.selection import SelectionGeometry, select, select_everything
from tests.support.errors import relative_error
from tests.support.latents import SCALE, VALUES, LatentCase, TensorPages, Walk, check_walk


def check(case: LatentCase, cut: Walk, unit: int = 1):
    plan = [
        plan_blocks(start, length, cut.block, 1, 0, unit, None)
        for start, length in ((0, case.shared), (case.shared, case.own))
    ]
    check_walk(case, cut, plan)


@pytest.mark.parametrize("shared, own", [(0, 1), (1, 1), (9, 6), (20, 1), (0, 13)])
@pytest.mark.parametrize("top_k", [1, 4, 50])
def test_blocks_over_pages(shared, own, top_k):
    check(LatentCase(shared, own, top_k=top_k), Walk(block=4, indexer=True))


@pytest.mark.parametrize("batch", [2, 3])
def test_a_batch_shares_pages_of_batch_one(batch):
    """The shared pages' adjoints are the sum over the batch."""
    check(LatentCase(9, 6, batch, top_k=3), Walk(block=4, indexer=True))


def test_every_key():
    """Blocks within the first top-k tokens have no selection: all keys take part."""
    check(LatentCase(12, 9, 2, top_k=100), Walk(block=5, dense=True, rows_at_once=2, indexer=True))


@settings(max_examples=15, deadline=None)
@given(
    shared=st.integers(0, 14), own=st.integers(1, 9), batch=st.integers(1, 3), top_k=st.integers(1, 20),
    relu=st.booleans(), quantum=st.sampled_from([None, 0.7, 2.0]), block=st.integers(1, 8), unit=st.integers(1, 3),
    rows=st.integers(1, 9), elements=st.integers(1, 200),
)
def test_any_sizes(shared, own, batch, top_k, relu, quantum, block, unit, rows, elements):
    case = LatentCase(shared, own, batch, top_k, relu, quantum, seed=shared + own)
    check(case, Walk(block, rows, elements, elements, elements, indexer=True), unit)


def test_select_everything_is_what_select_would_choose():
    case = LatentCase(7, 6, 2, top_k=100)
    t, layout = case.draw(), BlockLayout(7, 6)
    pages = TensorPages(t["index_k"][:1, :7], torch.arange(7))
    geometry = SelectionGeometry(layout, 100, True, 4, (pages,))
    chosen = select(t["index_q"][:, :, 7:], t["weights"][:, :, 7:], t["index_k"][:, 7:], geometry)
    everything = select_everything(layout, 4, (pages,), 2, torch.device("cpu"))
    for a, b in zip(chosen.tensors(), everything.tensors(), strict=True):
        b = b.sort(-1, descending=True).values
        assert torch.equal(a, b[..., : a.shape[-1]]) and (b[..., a.shape[-1] :] == -1).all()


def whole(dtype, row_weights=None, scale_scores=1.0, top_k=5):
    """The loss of one block that is the whole sequence, in `dtype`, and the float64 oracle's."""
    case = LatentCase(0, 40, top_k=top_k, seed=3)
    t = {name: x.clone() for name, x in case.draw().items()}
    t["weights"] *= scale_scores
    row_weights = t["row_weights"] if row_weights is None else row_weights
    layout = BlockLayout(0, 40)
    selection = select(t["index_q"], t["weights"], t["index_k"], SelectionGeometry(layout, top_k, True, 16, ()))
    mask = torch.zeros(1, 40, 40, dtype=torch.bool)
    for (a, b), (rows,) in zip(layout.sub_blocks(16), selection.parts):
        for w in range(b - a):
            mask[0, a + w, rows[0, w][rows[0, w] >= 0].long()] = True
    small = {name: x.to(dtype) for name, x in t.items()}
    _, lse = naive_sparse_attention(small["q"].double(), small["latents"].double(), mask, VALUES, SCALE)
    main = MainAttention(small["q"], small["latents"], lse.to(torch.promote_types(dtype, torch.float32)))
    geometry = IndexerLossGeometry(layout, SCALE, True, 16, (), ())
    found = differentiate_indexer(small["index_q"], small["weights"], small["index_k"], main, row_weights, selection, geometry)
    leaves = [t[name].requires_grad_() for name in ("index_q", "weights", "index_k")]
    loss = naive_indexer_loss(naive_scores(*leaves, True), t["q"], t["latents"], mask, row_weights, SCALE)
    loss.backward()
    return found, loss.detach(), [x.grad for x in leaves]


@pytest.mark.parametrize("dtype, bar", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=str)
def test_narrow_inputs(dtype, bar):
    """Loss and gradients are float32 whatever the inputs."""
    found, loss, grads = whole(dtype)
    assert {t.dtype for t in (found.loss, found.q, found.weights, found.k)} == {torch.float32}
    assert abs(found.loss - loss) <= bar * loss
    for a, b in zip((found.q, found.weights, found.k), grads):
        assert relative_error(a, b) <= bar


def test_a_certain_indexer():
    """Scores far apart: q underflows where p does not, and loss and gradients stay finite and right."""
    found, loss, grads = whole(torch.float64, scale_scores=1e4)
    assert loss > 1e3
    torch.testing.assert_close(found.loss, loss, rtol=1e-12, atol=0)
    for a, b in zip((found.q, found.weights, found.k), grads):
        assert relative_error(a, b) <= 1e-12


def test_without_weights_everything_is_zero():
    found, _, _ = whole(torch.float64, row_weights=torch.zeros(1, 40, dtype=torch.float64))
    assert not any(t.count_nonzero() for t in (found.loss, found.q, found.weights, found.k))


def test_one_key_teaches_nothing():
    found, _, _ = whole(torch.float64, top_k=1)
    assert max(t.abs().max() for t in (found.loss, found.q, found.weights, found.k)) < 1e-14


@pytest.mark.parametrize("broken", ["adjoints", "target", "backward"])
def test_the_comparison_sees_it(monkeypatch, broken):
    """Drop what earlier keys get, take another target, or cut the relu's mask: each must show."""
    if broken == "adjoints":
        monkeypatch.setattr(
            indexer_loss, "score_rows_bwd",
            lambda ds, q, w, rows, keys, adjoint, relu, n: score_rows_bwd(ds, q, w, rows, keys, None, relu, n),
        )
    elif broken == "target":
        monkeypatch.setattr(
            indexer_loss, "target_rows",
            lambda q, lse, latents, rows, scale, n: target_rows(q, lse, latents, rows, scale, n) ** 1.001,
        )
    else:
        monkeypatch.setattr(
            indexer_loss, "score_rows_bwd",
            lambda ds, q, w, rows, keys, adjoint, relu, n: score_rows_bwd(ds, q, w, rows, keys, adjoint, False, n),
        )
    with pytest.raises(AssertionError, match="dindex|dweights"):
        check(LatentCase(9, 6, top_k=3), Walk(block=4, indexer=True))


def test_no_row_of_scores_is_wider_than_asked(monkeypatch):
    """With room for one query at a time, each product is of one query."""
    seen = []
    original = indexer_loss.matmul_wide
    monkeypatch.setattr(indexer_loss, "matmul_wide", lambda a, b: seen.append(len(a)) or original(a, b))
    check(LatentCase(9, 6, top_k=3), Walk(block=4, elements_at_once=1, indexer=True))
    assert seen and set(seen) == {1}
