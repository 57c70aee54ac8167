"""Among equal index scores Megatron's DSAttention takes the earlier positions, as ours does."""

import torch
from megatron.core.transformer.experimental_attention_variant import dsa

from longstraw.attention.naive_sparse import naive_scores, naive_selection
from longstraw.patches.stable_selection import install_stable_selection


def select(q, k, weights, top_k):
    """q [S, I, E], k [S, E], weights [S, I] -> Megatron's scores [S, S] and indices [S, K]."""
    mask = torch.full((len(q), len(q)), -torch.inf).triu(1)
    scores, indices = dsa.fused_qk_topk_naive(q[:, None], k[:, None], weights[:, None], top_k, mask)
    return scores[0], indices[0]


def test_ties_go_to_the_earlier_position():
    install_stable_selection()
    generator = torch.Generator().manual_seed(0)
    q, k, w = (torch.randn(shape, generator=generator).round() for shape in ((40, 2, 3), (40, 3), (40, 2)))
    scores, indices = select(q, k, w, 5)
    at = torch.arange(40)
    mask = naive_selection(naive_scores(q.transpose(0, 1)[None], w.t()[None], k[None], True), at, at, 5)[0]
    assert [set(row[row >= 0].tolist()) for row in indices] == [set(row.nonzero()[:, 0].tolist()) for row in mask]
    top = scores.topk(5).indices
    assert any(set(top[i].tolist()) != set(indices[i].tolist()) for i in range(5, 40)), "no tie that topk breaks otherwise"
    assert (indices[1] == -1).sum() == 3


def test_a_second_installation_does_nothing():
    install_stable_selection()
    installed = dsa.fused_qk_topk_naive
    install_stable_selection()
    assert dsa.fused_qk_topk_naive is installed and not hasattr(installed._longstraw_original, "_longstraw_original")
