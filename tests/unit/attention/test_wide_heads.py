"""Attention in blocks of matrix products (for heads wider than the fused kernels take) against aten's CPU kernel."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw.attention.kernels import attend_bwd, attend_fwd
from longstraw.attention.wide_heads import wide_heads_bwd, wide_heads_fwd
from tests.support.errors import relative_error


def draw(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check(batch, heads, groups, queries, keys, dim, causal, scores_at_once):
    q, do = (draw(batch, heads, queries, dim, seed=i) for i in (1, 2))
    k, v = (draw(batch, groups, keys, dim, seed=i) for i in (3, 4))
    o, lse = attend_fwd(q, k, v, causal, 0.3)
    found = [*wide_heads_fwd(q, k, v, causal, 0.3, scores_at_once)]
    found += wide_heads_bwd(do, q, k, v, o, lse, causal, 0.3, scores_at_once)
    expected = [o, lse, *attend_bwd(do, q, k, v, o, lse, causal, 0.3)]
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-10, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 2), groups=st.integers(1, 2), share=st.integers(1, 3), queries=st.integers(1, 9),
    keys=st.integers(1, 9), causal=st.booleans(), scores=st.integers(1, 400),
)
def test_any_blocks(batch, groups, share, queries, keys, causal, scores):
    check(batch, groups * share, groups, queries, queries if causal else keys, 8, causal, scores)


@pytest.mark.parametrize("dim", [320, 576])
def test_wide_heads(dim):
    check(1, 4, 1, 5, 5, dim, True, 30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_keep_wide_sums(dtype):
    q, k, v = (draw(1, h, 33, 16, seed=h).to(dtype) for h in (4, 1, 2))
    v = v[:, :1]
    o, lse = wide_heads_fwd(q, k, v, True, 0.3, 200)
    assert o.dtype is lse.dtype is torch.float32
    exact, _ = wide_heads_fwd(q.double(), k.double(), v.double(), True, 0.3)
    plain = attend_fwd(q, k, v, True, 0.3)[0]
    assert relative_error([o], [exact]) <= max(2 * relative_error([plain], [exact]), 1e-6)
