"""Row layouts: against loops that say where each row goes, and back without losing a bit."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw.rollout.row_layouts import GroupedQKV, StackedRows


def naive_qkv(q, k, v, *, heads, groups, head_dim, gated):
    """linear_qkv row by row, as megatron/core/transformer/attention.py splits it: query heads, gates, key, value."""
    per_group, rows = heads // groups, []
    width = head_dim * (2 if gated else 1)
    for group in range(groups):
        own = range(group * per_group, (group + 1) * per_group)
        rows += [q[head * width + d] for head in own for d in range(head_dim)]
        if gated:
            rows += [q[head * width + head_dim + d] for head in own for d in range(head_dim)]
        rows += [k[group * head_dim + d] for d in range(head_dim)]
        rows += [v[group * head_dim + d] for d in range(head_dim)]
    return torch.stack(rows)


@settings(max_examples=25, deadline=None)
@given(groups=st.integers(1, 3), per_group=st.integers(1, 3), head_dim=st.integers(1, 5), gated=st.booleans())
def test_grouped_qkv_is_the_row_by_row_layout_and_back(groups, per_group, head_dim, gated):
    heads = groups * per_group
    layout = GroupedQKV(heads, groups, head_dim, gated)
    rows = (heads * head_dim * (2 if gated else 1), groups * head_dim, groups * head_dim)
    start, tensors = 0, []
    for n in rows:
        tensors.append(torch.arange(start, start + n * 3).view(n, 3))
        start += n * 3
    merged = layout.merge(tensors)
    expected = naive_qkv(*tensors, heads=heads, groups=groups, head_dim=head_dim, gated=gated)
    assert torch.equal(merged, expected)
    for found, original in zip(layout.split(merged), tensors, strict=True):
        assert torch.equal(found, original)


@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_stacked_rows_keep_the_order(sizes):
    layout = StackedRows(tuple(sizes))
    tensors = [torch.full((n, 2), float(i)) for i, n in enumerate(sizes)]
    merged = layout.merge(tensors)
    assert merged[:, 0].tolist() == [float(i) for i, n in enumerate(sizes) for _ in range(n)]
    assert all(torch.equal(a, b) for a, b in zip(layout.split(merged), tensors, strict=True))
