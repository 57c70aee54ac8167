"""Exact top-k: the order of packed keys, the cases that went wrong elsewhere, and any cut of queries and keys."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw.attention import selection as selection_module
from longstraw.attention.layout import BlockLayout
from longstraw.attention.naive_sparse import naive_scores, naive_selection
from longstraw.attention.selection import (
    NOTHING, Selection, SelectionGeometry, index_scores, pack_keys, select, unpack_positions,
)
from tests.support.latents import TensorPages

INFINITY = float("inf")


def draw(*shape, seed, whole=False):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.round() if whole else x


def select_positions(scores, top_k, *, spans=(), **options) -> list[list[set[int]]]:
    """Selected positions of each query of a block, given its scores [B, S, N] of N = history + S keys.

    The history's keys lie in pages of the lengths `spans`. Index dim 1, one head: the key of position n is one-hot.
    """
    batch, queries, keys = scores.shape
    index_k, start = torch.eye(keys, dtype=torch.float64).expand(batch, -1, -1), keys - queries
    pages, at = [], 0
    for span in spans:
        pages.append(TensorPages(index_k[:, at : at + span], torch.arange(at, at + span)))
        at += span
    assert at == start
    layout = BlockLayout(start, queries)
    geometry = SelectionGeometry(layout, top_k, False, options.pop("rows_at_once", 4096), tuple(pages), **options)
    weights = torch.ones(batch, 1, queries, dtype=torch.float64)
    found = select(scores[:, None].clone(), weights, index_k[:, start:], geometry)
    positions = [page.at for page in pages] + [torch.arange(start, keys)]
    return positions_of(found, positions, layout, batch, geometry.rows_at_once)


def positions_of(found: Selection, positions, layout, batch, rows_at_once):
    chosen = [[set() for _ in range(layout.length)] for _ in range(batch)]
    for (a, _), sources in zip(layout.sub_blocks(rows_at_once), found.parts, strict=True):
        for rows, at in zip(sources, positions, strict=True):
            assert rows.dtype is torch.int32
            for i, w, _ in (rows >= 0).nonzero().tolist():
                picked = rows[i, w][rows[i, w] >= 0].long()
                assert len(picked) == len(picked.unique()), "a row selected twice"
                chosen[i][a + w] |= set(at[picked].tolist())
    return chosen


def test_packed_keys_order_by_score_then_position():
    scores = torch.tensor([-INFINITY, -3.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 3e38, INFINITY], dtype=torch.float32)
    early, late = pack_keys(scores, torch.tensor(3)), pack_keys(scores, torch.tensor(2**32 - 1))
    assert (early > late).all()
    assert early[3] == early[4], "-0.0 and 0.0 tie"
    order = [i for i in range(9) if i != 4]
    assert (late[order][1:] > early[order][:-1]).all(), "any higher score beats any earlier position"
    assert (late > NOTHING).all()
    assert unpack_positions(late).tolist() == [2**32 - 1] * 9 and unpack_positions(early).tolist() == [3] * 9


@pytest.mark.parametrize("spans", [(3,), (2, 1), (1, 0, 2)], ids=str)
def test_equal_scores_go_to_the_earlier_position(spans):
    scores = torch.tensor([[[1.0, 1.0, 1.0, 0.0]]], dtype=torch.float64)
    assert select_positions(scores, 2, spans=spans) == [[{0, 1}]]
    assert select_positions(scores, 2, spans=spans, keys_at_once=1) == [[{0, 1}]]


def test_negative_zero_ties_with_zero():
    scores = torch.tensor([[[-0.0, 0.0, -0.0, 0.0]]], dtype=torch.float64)
    assert select_positions(scores, 2, spans=(3,)) == [[{0, 1}]]


def test_a_query_never_selects_more_than_what_it_sees():
    """T = 6, k = 4: query 1 uses its 2 keys, and nobody a key after its own position."""
    scores = torch.arange(36.0, dtype=torch.float64).view(1, 6, 6)  # later keys score higher
    found = select_positions(scores, 4)[0]
    assert found == [{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {1, 2, 3, 4}, {2, 3, 4, 5}]


@pytest.mark.parametrize("top_k", [6, 7, 1000])
def test_no_fewer_keys_than_there_are_selects_all(top_k):
    found = select_positions(draw(1, 6, 6, seed=1), top_k)[0]
    assert found == [set(range(s + 1)) for s in range(6)]


def test_scores_are_the_weighted_sum_over_heads():
    q, w, k = draw(5, 3, 4, seed=1), draw(5, 3, seed=2), draw(7, 4, seed=3)
    for relu in (True, False):
        expected = naive_scores(q.transpose(0, 1)[None], w.t()[None], k[None], relu)[0]
        torch.testing.assert_close(index_scores(q, w, k, relu), expected)
    assert index_scores(q.bfloat16(), w.bfloat16(), k.bfloat16(), True).dtype is torch.float32


@settings(max_examples=60, deadline=None)
@given(
    spans=st.lists(st.integers(0, 9), max_size=3), queries=st.integers(1, 9), batch=st.integers(1, 3),
    top_k=st.integers(1, 12), whole=st.booleans(), rows=st.integers(1, 10), keys=st.integers(1, 20),
    scores=st.integers(1, 60),
)
def test_any_cut_selects_what_a_full_sort_selects(spans, queries, batch, top_k, whole, rows, keys, scores):
    total = sum(spans) + queries
    drawn = draw(batch, queries, total, seed=total, whole=whole)
    at = torch.arange(total)
    mask = naive_selection(drawn, at[sum(spans) :], at, top_k)
    found = select_positions(
        drawn, top_k, spans=spans, rows_at_once=rows, keys_at_once=keys, scores_at_once=scores
    )
    assert found == [[set(row.nonzero()[:, 0].tolist()) for row in member] for member in mask]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("whole", [False, True])
def test_keys_that_cannot_enter_a_full_list_are_not_packed(monkeypatch, whole, dtype):
    """A thousand keys in tiles of 50, with ties and infinities: the rule, though most tiles pack next to nothing."""
    scores = draw(1, 6, 1000, seed=7, whole=whole).type(dtype)
    scores[0, 0, ::3], scores[0, 1] = -INFINITY, -INFINITY
    scores[0, 2, ::7] = INFINITY
    scores[0, 3] = scores[0, 3].abs()  # of a later key the score is hardly ever better: most are ties where they are whole
    scores[0, 4] = torch.arange(1000)  # every key is better than all before
    packed, original = [], selection_module.pack_keys
    monkeypatch.setattr(selection_module, "pack_keys", lambda s, at: packed.append(s.numel()) or original(s, at))
    best = torch.empty(6, 0, dtype=torch.int64)
    at = torch.arange(1000)
    for a in range(0, 1000, 50):
        merge = selection_module._merge if a == 0 else selection_module._merge_better
        best = merge(best, scores[0, :, a : a + 50], at[a : a + 50], None, 10)
    mask = naive_selection(scores, torch.full((6,), 1000), at, 10)[0]
    assert [set(row.tolist()) for row in unpack_positions(best)] == [set(row.nonzero()[:, 0].tolist()) for row in mask]
    assert sum(packed) < 6 * 1000 / 2, packed
    assert (best[:, :-1] > best[:, 1:]).all()


@pytest.mark.parametrize("queries, keys", [(1, 1), (3, 8), (5, 13)])
def test_the_short_cut_is_the_long_way(queries, keys):
    """Lists with places still free, a causal limit, not-a-number: the same lists, whichever way they are merged."""
    scores = draw(1, queries, keys, seed=3, whole=True)[0].float()
    scores[:, keys // 2] = float("nan")
    best, at = torch.full((queries, 3), NOTHING), torch.arange(40, 40 + keys)
    best[: queries // 2] = pack_keys(torch.tensor([1.0, 0.0, -0.0]), torch.tensor([3, 5, 6]))
    best[: queries // 4, -1] = pack_keys(torch.tensor(-INFINITY), torch.tensor(1))
    limits = torch.arange(39, 39 + queries)[:, None]
    for seen in (None, limits):
        expected = selection_module._merge(best, scores, at, seen, 3)
        assert torch.equal(selection_module._merge_better(best, scores, at, seen, 3), expected)


def test_a_batch_shares_pages_of_batch_one():
    q, w, k = draw(3, 2, 4, 5, seed=1), draw(3, 2, 4, seed=2), draw(1, 9, 5, seed=3)
    own, layout = draw(3, 4, 5, seed=4), BlockLayout(9, 4)
    found = []
    for keys in (k, k.expand(3, -1, -1)):
        geometry = SelectionGeometry(layout, 3, True, 4096, (TensorPages(keys, torch.arange(9)),))
        found.append(select(q, w, own, geometry).tensors())
    assert all(map(torch.equal, *found))


def test_rows_are_as_wide_as_they_must_be():
    """All of a query's keys lie in one page: the other sources cost nothing."""
    scores = torch.cat([torch.full((1, 2, 5), 9.0), torch.zeros(1, 2, 6)], 2).double()
    geometry = SelectionGeometry(BlockLayout(9, 2), 3, False, 4096, ())
    keys = torch.eye(11, dtype=torch.float64)[None]
    pages = (TensorPages(keys[:, :5], torch.arange(5)), TensorPages(keys[:, 5:9], torch.arange(5, 9)))
    geometry = SelectionGeometry(geometry.layout, 3, False, 4096, pages)
    found = select(scores[:, None], torch.ones(1, 1, 2).double(), keys[:, 9:], geometry)
    assert [rows.shape[-1] for rows in found.parts[0]] == [3, 0, 0]


def test_no_tensor_of_block_times_prompt(monkeypatch):
    """512 queries over 4,096 keys: no int64 or score tensor holds more than a fraction of all the pairs."""
    largest, original = [0], torch.Tensor.topk

    def watch(keys, *args, **kwargs):
        largest[0] = max(largest[0], keys.numel())
        return original(keys, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "topk", watch)
    scored = []
    original_scores = selection_module.index_scores
    monkeypatch.setattr(
        selection_module, "index_scores", lambda *args: scored.append(original_scores(*args)) or scored[-1]
    )
    pages = TensorPages(draw(1, 4096, 2, seed=1), torch.arange(4096))
    geometry = SelectionGeometry(BlockLayout(4096, 512), 8, True, 4096, (pages,), keys_at_once=256, scores_at_once=2**14)
    select(draw(1, 1, 512, 2, seed=2), draw(1, 1, 512, seed=3), draw(1, 512, 2, seed=4), geometry)
    assert 0 < largest[0] < 512 * 4096 / 64
    assert max(s.numel() for s in scored) <= 2**14
