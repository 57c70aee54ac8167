"""One span of attention: forward with log-sum-exp, backward from the global output and log-sum-exp.

The oracle is float64 autograd through the written-out softmax. Precision is judged by ratio: at most twice the error of
plain PyTorch in the same dtype, over outputs and gradients together.
"""

import pytest
import torch

from longstraw.attention import kernels
from longstraw.attention.naive import naive_attention
from tests.support.errors import error_ratio, relative_error

# What runs on this machine's device, and the form that CUDA uses for float64.
PATHS = {
    "picked": (kernels.attend_fwd, kernels.attend_bwd),
    "plain": (kernels._plain_fwd, kernels._plain_bwd),
}
SHAPES = [  # B, H, G, S, N, D, causal
    (1, 1, 1, 1, 1, 8, True),
    (2, 4, 2, 5, 9, 16, False),
    (1, 6, 2, 33, 33, 32, True),
    (3, 4, 1, 1, 70, 8, False),
    (1, 3, 3, 65, 130, 64, False),
    (2, 8, 2, 129, 129, 16, True),
]


def draw(shape, seed=0):
    b, h, g, s, n, d, _ = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = [(b, h, s, d), (b, g, n, d), (b, g, n, d), (b, h, s, d)]
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]


def expand(t, heads):
    return t.repeat_interleave(heads // t.shape[1], dim=1)


def written_out(q, k, v, causal, scale):
    """Softmax attention in the dtype of q, as one would write it in plain PyTorch; also the log-sum-exp."""
    scores = (q @ expand(k, q.shape[1]).transpose(-1, -2)) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ expand(v, q.shape[1]), scores.logsumexp(-1)


def differentiate(q, k, v, do, causal, scale):
    """(o, lse, dq, dk, dv) by autograd of the written-out form."""
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    o, lse = written_out(*leaves, causal, scale)
    o.backward(do)
    return [o.detach(), lse.detach(), *(leaf.grad for leaf in leaves)]


def run_path(path, q, k, v, do, causal, scale):
    fwd, bwd = PATHS[path]
    o, lse = fwd(q, k, v, causal, scale)
    return [o, lse, *bwd(do, q, k, v, o, lse, causal, scale)]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float64_equals_autograd(path, shape):
    inputs, causal = draw(shape), shape[-1]
    found = run_path(path, *inputs, causal, 0.3)
    expected = differentiate(*inputs, causal, 0.3)
    assert relative_error(found, expected) < 1e-14


@pytest.mark.parametrize("path, dtype", [("picked", torch.bfloat16), ("picked", torch.float32), ("plain", torch.float32)])
def test_error_is_at_most_twice_plain_pytorch(path, dtype):
    ratios = []
    for seed, shape in enumerate(SHAPES[1:]):
        exact, causal = draw(shape, seed), shape[-1]
        rounded = [t.to(dtype) for t in exact]
        oracle = differentiate(*(t.double() for t in rounded), causal, shape[5] ** -0.5)
        plain = differentiate(*rounded, causal, shape[5] ** -0.5)
        found = run_path(path, *rounded, causal, shape[5] ** -0.5)
        ratios.append(error_ratio(found, plain, oracle))
    assert sum(ratios) / len(ratios) < 2, ratios


def test_log_sum_exp_is_never_narrower_than_float32():
    q, k, v, _ = (t.bfloat16() for t in draw(SHAPES[1]))
    o, lse = kernels.attend_fwd(q, k, v, False, 1.0)
    assert (o.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert kernels.attend_fwd(q.double(), k.double(), v.double(), False, 1.0)[1].dtype is torch.float64


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("cuts", [(1,), (3, 4), (1, 2, 9)])
def test_backward_of_each_span_from_the_global_output(path, cuts):
    """Keys cut into spans: with the output and log-sum-exp over all of them, each span's gradients are its exact share."""
    shape = (2, 4, 2, 6, 11, 8, False)
    q, k, v, do = draw(shape)
    o, lse, dq, dk, dv = differentiate(q, k, v, do, False, 0.25)
    bounds = [0, *cuts, 11]
    spans = [slice(a, b) for a, b in zip(bounds, bounds[1:])]
    parts = [PATHS[path][1](do, q, k[:, :, s], v[:, :, s], o, lse, False, 0.25) for s in spans]
    found = [sum(p[0] for p in parts), torch.cat([p[1] for p in parts], 2), torch.cat([p[2] for p in parts], 2)]
    assert relative_error(found, [dq, dk, dv]) < 1e-14


@pytest.mark.parametrize("path", PATHS)
def test_backward_from_a_local_output_is_wrong(path):
    """The control of the test above: the span's own output and log-sum-exp do not do."""
    q, k, v, do = draw((2, 4, 2, 6, 11, 8, False))
    expected = differentiate(q, k, v, do, False, 0.25)[3][:, :, :4]
    fwd, bwd = PATHS[path]
    own = fwd(q, k[:, :, :4], v[:, :, :4], False, 0.25)
    found = bwd(do, q, k[:, :, :4], v[:, :, :4], *own, False, 0.25)[1]
    assert relative_error([found], [expected]) > 0.1


def test_heads_expand_and_sum_are_transposes():
    """<expand(x), y> = <x, sum(y)> for the two reshapes that the CUDA paths use around kernels without grouped heads."""
    x, y = torch.randn(2, 3, 5, 4, dtype=torch.float64), torch.randn(2, 12, 5, 4, dtype=torch.float64)
    expanded = kernels._expand_heads(y, x)
    assert torch.equal(expanded, expand(x, 12))
    torch.testing.assert_close((expanded * y).sum(), (x * kernels._sum_heads(y, 3)).sum())


def test_naive_form_by_positions():
    """The specification itself, against the written-out form, with a query that sees no key."""
    q, k, v, _ = draw((1, 4, 2, 3, 5, 8, False))
    o, lse = naive_attention(q, k, v, torch.tensor([-1, 1, 9]), torch.arange(5), 0.5)
    assert o[:, :, 0].abs().max() == 0 and (lse[:, :, 0] == -torch.inf).all()
    for row, keys in ((1, 2), (2, 5)):
        expected = written_out(q[:, :, row : row + 1], k[:, :, :keys], v[:, :, :keys], False, 0.5)
        torch.testing.assert_close(o[:, :, row : row + 1], expected[0])
        torch.testing.assert_close(lse[:, :, row : row + 1], expected[1])
