"""Merging partial results, and the collectives on one rank; on several ranks: tests/ranks/test_engine_attention.py."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw.attention.exchange import gather_rows, gather_tokens, merge_partials, scatter_rows
from longstraw.attention.layout import BlockLayout
from longstraw.attention.naive import naive_attention


def partials_of(keys_of, seed=0):
    """Partial (o, lse) over each set of keys, and the pair over all of them."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 3, n, 8, generator=generator, dtype=torch.float64) for n in (5, 12, 12))
    everywhere = torch.full((5,), 99)
    parts = [naive_attention(q, k[:, :, at], v[:, :, at], everywhere, at, 0.4) for at in keys_of]
    return torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]), q, k, v


@settings(max_examples=40, deadline=None)
@given(owner=st.lists(st.integers(0, 3), min_size=12, max_size=12))
def test_merge_of_any_split_of_the_keys(owner):
    """Whoever owns which key, empty owners included, the merged result is that of one softmax."""
    owner = torch.tensor(owner)
    o, lse, q, k, v = partials_of([(owner == p).nonzero()[:, 0] for p in range(4)])
    merged, total = merge_partials(o, lse)
    expected = naive_attention(q, k, v, torch.full((5,), 99), torch.arange(12), 0.4)
    torch.testing.assert_close(merged, expected[0])
    torch.testing.assert_close(total, expected[1])


def test_merge_does_not_depend_on_order_and_survives_large_scores():
    o, lse, *_ = partials_of([torch.arange(0, 4), torch.arange(4, 12)])
    lse = lse + torch.tensor([800.0, 0.0])[:, None, None, None]  # exp would overflow
    merged, total = merge_partials(o, lse)
    assert merged.isfinite().all()
    torch.testing.assert_close(merged, o[0])
    back, total_back = merge_partials(o.flip(0), lse.flip(0))
    torch.testing.assert_close(back, merged)
    torch.testing.assert_close(total_back, total)


def test_one_rank_exchanges_nothing():
    layout = BlockLayout(3, 7)
    x = torch.randn(2, 3, 7, 4)
    assert torch.equal(gather_rows(x.transpose(0, 1), layout), x.transpose(0, 1))
    assert gather_rows(x.transpose(0, 1), layout).is_contiguous()
    assert torch.equal(scatter_rows(x, layout)[0], x)


def test_gather_tokens_drops_padding():
    layout = BlockLayout(0, 5, unit=4)
    own = torch.randn(3, 5, requires_grad=True)
    gathered = gather_tokens(own, layout)
    assert torch.equal(gathered, own) and not gathered.requires_grad
