"""Chunked log-probabilities against the naive form: values, gradients, memory, padding, precision. One rank;
`test_vocab_parallel_logprobs.py` splits the vocabulary over two."""

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longstraw.objectives import compute_logprobs, naive_logprobs

F64 = torch.float64


def draw(tokens, hidden_size, vocab, dtype=F64, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, hidden_size, generator=generator, dtype=F64) * scale
    weight = torch.randn(vocab, hidden_size, generator=generator, dtype=F64)
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    grad = torch.randn(tokens, generator=generator, dtype=F64)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets, grad


def value_and_gradients(function, hidden, weight, targets, grad, **settings):
    logprobs = function(hidden, weight, targets, **settings)
    return logprobs.detach(), *torch.autograd.grad(logprobs, (hidden, weight), grad.to(logprobs.dtype))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 13),
    st.integers(1, 7),
    st.integers(1, 19),
    st.integers(1, 20),
    st.sampled_from([0.3, 1.0, 1.7]),
    st.integers(0, 5),
)
def test_equals_naive_for_every_chunk_size(tokens, hidden_size, vocab_size, chunk, temperature, padding):
    inputs = draw(tokens, hidden_size, vocab_size + padding)
    inputs[2].clamp_(max=vocab_size - 1)
    settings = dict(temperature=temperature, vocab_size=vocab_size)
    expected = value_and_gradients(naive_logprobs, *inputs, **settings)
    got = value_and_gradients(compute_logprobs, *inputs, chunk_tokens=chunk, **settings)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_chunk_sizes_give_the_same_values_and_gradients(dtype):
    tokens = 23
    inputs = draw(tokens, 16, 50, dtype)
    whole = value_and_gradients(compute_logprobs, *inputs, chunk_tokens=tokens)
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for chunk in (1, 7, tokens, tokens + 5):
        got = value_and_gradients(compute_logprobs, *inputs, chunk_tokens=chunk)
        torch.testing.assert_close(got, whole, rtol=tolerance, atol=tolerance)


def test_gradcheck():
    hidden, weight, targets, _ = draw(5, 3, 6)
    assert torch.autograd.gradcheck(
        lambda h, w: compute_logprobs(h, w, targets, chunk_tokens=2, temperature=0.7, vocab_size=6), (hidden, weight)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 8, 64])
@pytest.mark.parametrize("scale", [0.2, 10.0])
def test_error_is_at_most_twice_that_of_plain_pytorch(dtype, chunk, scale):
    """Errors against float64 on the same rounded inputs, norms over three seeds."""
    ours, plain = torch.zeros(3, dtype=F64), torch.zeros(3, dtype=F64)
    for seed in range(3):
        hidden, weight, targets, grad = draw(64, 32, 300, dtype, seed, scale)
        exact_inputs = [t.detach().to(F64).requires_grad_() for t in (hidden, weight)]
        exact = value_and_gradients(naive_logprobs, *exact_inputs, targets, grad)
        for errors, function, settings in (
            (ours, compute_logprobs, dict(chunk_tokens=chunk)),
            (plain, naive_logprobs, {}),
        ):
            got = value_and_gradients(function, hidden, weight, targets, grad, **settings)
            assert [t.dtype for t in got] == [torch.float32, dtype, dtype]
            errors += torch.stack([(g.to(F64) - e).square().sum() for g, e in zip(got, exact)])
    assert (ours.sqrt() <= 2 * plain.sqrt()).all(), (ours.sqrt() / plain.sqrt()).tolist()


def test_large_exact_logits_lose_nothing_to_the_log_sum_exp():
    """Logits around 4000, exact in float32. Rounding maximum + log-sum to one float32 would cost 1e-4."""
    weight = torch.tensor([[4000.0], [4000.75], [3999.5], [3998.25]]).requires_grad_()
    hidden, targets, grad = torch.ones(1, 1).requires_grad_(), torch.tensor([2]), torch.ones(1)
    got = value_and_gradients(compute_logprobs, hidden, weight, targets, grad)
    exact_inputs = [t.detach().to(F64).requires_grad_() for t in (hidden, weight)]
    exact = value_and_gradients(naive_logprobs, *exact_inputs, targets, grad)
    for ours, theirs in ((got[0], exact[0]), (got[2], exact[2])):
        torch.testing.assert_close(ours.to(F64), theirs, rtol=1e-6, atol=1e-7)


def test_padding_rows_have_no_probability_and_no_gradient():
    hidden, weight, targets, grad = draw(9, 4, 128)
    targets %= 101
    with torch.no_grad():
        weight[101:] = 1e4
    logprobs, grad_hidden, grad_weight = value_and_gradients(
        compute_logprobs, hidden, weight, targets, grad, chunk_tokens=4, vocab_size=101
    )
    unpadded = weight[:101].detach().requires_grad_()
    expected = value_and_gradients(naive_logprobs, hidden, unpadded, targets, grad)
    torch.testing.assert_close((logprobs, grad_hidden, grad_weight[:101]), expected, rtol=1e-12, atol=1e-13)
    assert torch.equal(grad_weight[101:], torch.zeros(27, 4, dtype=F64))


def test_entropy_equals_the_definition_and_has_no_gradient():
    hidden, weight, targets, _ = draw(9, 4, 31)
    targets.clamp_(max=28)
    logprobs, entropy = compute_logprobs(
        hidden, weight, targets, chunk_tokens=4, temperature=0.7, vocab_size=29, with_entropy=True
    )
    log_softmax = torch.log_softmax(hidden @ weight[:29].t() / 0.7, -1)
    torch.testing.assert_close(entropy, -(log_softmax.exp() * log_softmax).sum(-1).detach(), rtol=1e-12, atol=1e-13)
    assert logprobs.requires_grad and not entropy.requires_grad
    plain = compute_logprobs(hidden, weight, targets, chunk_tokens=4, temperature=0.7, vocab_size=29)
    assert torch.equal(plain, logprobs)


def test_values_alone_build_no_graph_and_equal_those_with_gradient():
    hidden, weight, targets, _ = draw(9, 4, 31, torch.float32)
    with_grad = compute_logprobs(hidden, weight, targets, chunk_tokens=4)
    with torch.no_grad():
        alone = compute_logprobs(hidden, weight, targets, chunk_tokens=4)
    assert not alone.requires_grad and torch.equal(alone, with_grad)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_gradient_of_one_input_alone(frozen):
    hidden, weight, targets, grad = draw(9, 4, 31)
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    wanted = weight if frozen == "hidden" else hidden
    (expected,) = torch.autograd.grad(naive_logprobs(hidden, weight, targets), wanted, grad)
    (got,) = torch.autograd.grad(compute_logprobs(hidden, weight, targets, chunk_tokens=4), wanted, grad)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


def test_no_tokens_still_give_gradients_of_zero():
    hidden, weight, targets, grad = draw(0, 4, 31)
    logprobs, grad_hidden, grad_weight = value_and_gradients(compute_logprobs, hidden, weight, targets, grad)
    assert logprobs.shape == (0,) and grad_hidden.shape == (0, 4)
    assert torch.equal(grad_weight, torch.zeros(31, 4, dtype=F64))


def test_nan_shows_in_its_token_only():
    hidden, weight, targets, _ = draw(6, 4, 31)
    with torch.no_grad():
        hidden[2, 1] = torch.nan
    logprobs = compute_logprobs(hidden, weight, targets, chunk_tokens=4)
    assert logprobs.isnan().tolist() == [False, False, True, False, False, False]


# Memory.

TOKENS, HIDDEN, VOCAB, CHUNK = 96, 4, 512, 8


def test_nothing_saved_for_backward_is_as_large_as_the_logits():
    hidden, weight, targets, grad = draw(TOKENS, HIDDEN, VOCAB, torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        logprobs = compute_logprobs(hidden, weight, targets, chunk_tokens=CHUNK)
    assert saved and sorted(tuple(t.shape) for t in saved) == sorted([(96, 4), (512, 4), (96,), (96,), (96,)])
    del logprobs
    # The probe sees them in the naive form.
    saved.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        logprobs = naive_logprobs(hidden, weight, targets)
    assert any(t.numel() == TOKENS * VOCAB for t in saved)


class LiveStorage(TorchDispatchMode):
    """Peak bytes of the storages that operations create and that are still alive."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self.alive.setdefault(tensor.untyped_storage()._cdata, 0)
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.alive:
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


def peak_bytes(function, **settings):
    hidden, weight, targets, grad = draw(TOKENS, HIDDEN, VOCAB, torch.float32)
    with LiveStorage() as forward:
        logprobs = function(hidden, weight, targets, **settings)
    with LiveStorage() as backward:
        logprobs.backward(grad.float())
    return forward.peak, backward.peak


def test_live_storage_is_bounded_by_chunks_and_not_by_tokens():
    chunk_logits = CHUNK * VOCAB * 4
    forward, backward = peak_bytes(compute_logprobs, chunk_tokens=CHUNK)
    small = 12 * TOKENS * 8
    gradients = (TOKENS + VOCAB) * HIDDEN * 4
    assert forward <= 2 * chunk_logits + small
    assert backward <= 2 * chunk_logits + 2 * gradients + small
    # All tokens in one chunk, and the naive form, are seen to take more.
    for peaks in (peak_bytes(compute_logprobs, chunk_tokens=TOKENS), peak_bytes(naive_logprobs)):
        assert all(peak >= TOKENS * VOCAB * 4 for peak in peaks)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(hidden=torch.zeros(3, 1, 4)), "hidden must be"),
        (dict(hidden=torch.zeros(3, 5)), "hidden must be"),
        (dict(hidden=torch.zeros(3, 4, dtype=F64)), "must agree"),
        (dict(targets=torch.zeros(2, dtype=torch.int64)), "targets must be"),
        (dict(targets=torch.zeros(3, dtype=torch.int32)), "targets must be"),
        (dict(targets=torch.tensor([0, 7, 1])), r"lie in \[0, 7\)"),
        (dict(targets=torch.tensor([0, -100, 1])), "lie in"),
        (dict(targets=torch.tensor([0, 5, 1]), vocab_size=5), r"lie in \[0, 5\)"),
        (dict(vocab_size=8), "does not fit"),
        (dict(vocab_size=0), "does not fit"),
        (dict(chunk_tokens=0), "--logprob-chunk-tokens"),
        (dict(temperature=0.0), "--sampling-temperature 0"),
        (dict(temperature=float("nan")), "temperature above 0"),
    ],
)
def test_refuses_inputs_that_do_not_fit(change, words):
    inputs = dict(hidden=torch.zeros(3, 4), output_weight=torch.zeros(7, 4), targets=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=words):
        compute_logprobs(**(inputs | change))
