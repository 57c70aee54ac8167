"""The gated delta rule: chunked against token by token, split anywhere, differentiable in the state it starts from."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw.attention.delta_rule import chunked_delta_rule, naive_delta_rule
from tests.support.errors import relative_error


def draw(batch, tokens, heads=2, key_dim=5, value_dim=7, seed=0, dtype=torch.float64):
    """q, k, v, g, beta, initial_state as a layer makes them: unit keys, decays in (0, 1), strengths in (0, 1)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(normal(batch, tokens, heads, key_dim), dim=-1) for _ in range(2))
    v, g = normal(batch, tokens, heads, value_dim), -normal(batch, tokens, heads).exp()
    state = normal(batch, heads, key_dim, value_dim)
    return [t.to(dtype).requires_grad_() for t in (q, k, v, g, normal(batch, tokens, heads).sigmoid(), state)]


def differentiate(rule, inputs, seed=7):
    """(outputs, end state, every input's gradient) for random output gradients."""
    o, end = rule(*inputs)
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in (o, end)]
    return [o.detach(), end.detach(), *torch.autograd.grad((o, end), inputs, grads)]


def by_formula(q, k, v, g, beta, state):
    """S_t = exp(g) S (I - beta k k^T) + beta k v^T in matrices, for one batch member and head at a time."""
    outputs, ends = torch.empty_like(v), torch.empty_like(state)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            s, eye = state[b, h].T, torch.eye(q.shape[-1], dtype=q.dtype)
            for t in range(q.shape[1]):
                key, strength = k[b, t, h], beta[b, t, h]
                s = g[b, t, h].exp() * s @ (eye - strength * torch.outer(key, key)) + strength * torch.outer(v[b, t, h], key)
                outputs[b, t, h] = s @ q[b, t, h] * q.shape[-1] ** -0.5
            ends[b, h] = s.T
    return outputs, ends


def test_token_by_token_form_is_the_published_formula():
    inputs = [t.detach() for t in draw(2, 6)]
    found, expected = naive_delta_rule(*inputs), by_formula(*inputs)
    assert relative_error(found, expected) < 1e-14


@settings(max_examples=25, deadline=None)
@given(batch=st.integers(1, 2), tokens=st.integers(1, 75), chunk=st.integers(1, 40))
def test_chunked_equals_token_by_token(batch, tokens, chunk):
    inputs = draw(batch, tokens)
    found = differentiate(lambda *x: chunked_delta_rule(*x, chunk_size=chunk), inputs)
    assert relative_error(found, differentiate(naive_delta_rule, inputs)) < 1e-12


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(1, 69), max_size=4, unique=True))
def test_split_at_any_point(cuts):
    """Pieces one after another, each from the state the last one left: the same outputs, states and gradients."""
    bounds = [0, *sorted(cuts), 70]

    def in_pieces(q, k, v, g, beta, state):
        outputs = []
        for a, b in zip(bounds, bounds[1:]):
            rule = naive_delta_rule if b - a <= 4 else chunked_delta_rule
            o, state = rule(*(t[:, a:b] for t in (q, k, v, g, beta)), state)
            outputs.append(o)
        return torch.cat(outputs, 1), state

    inputs = draw(1, 70)
    assert relative_error(differentiate(in_pieces, inputs), differentiate(chunked_delta_rule, inputs)) < 1e-12


@pytest.mark.parametrize("rule", [naive_delta_rule, chunked_delta_rule])
def test_gradient_reaches_the_initial_state(rule):
    """Central differences of the rule itself, the state's gradient included."""
    assert torch.autograd.gradcheck(rule, draw(1, 9, heads=1, key_dim=3, value_dim=2))


@pytest.mark.parametrize("rule", [naive_delta_rule, chunked_delta_rule])
def test_strong_decay_stays_finite(rule):
    """Log-decays that sum to hundreds: exp above the diagonal would overflow if it were not masked before."""
    inputs = draw(1, 40)
    with torch.no_grad():
        inputs[3].fill_(-50.0)
    assert all(t.isfinite().all() for t in differentiate(rule, inputs))


def test_narrow_inputs_are_computed_wide():
    inputs = [t.detach().bfloat16() for t in draw(1, 20)[:5]]
    state = draw(1, 20)[5].detach().float()
    for rule in (naive_delta_rule, chunked_delta_rule):
        o, end = rule(*inputs, state)
        assert (o.dtype, end.dtype) == (torch.bfloat16, torch.float32)
        wide = rule(*(t.double() for t in inputs), state.double())
        assert relative_error([o], [wide[0]]) < 2**-8 and relative_error([end], [wide[1]]) < 1e-6
