"""The ranks of `test_vocab_parallel_logprobs.py`: every case agrees with the naive form on the whole vocabulary, and the
sums over ranks of counts and statistics with one rank's."""

import torch
import torch.distributed as dist

from longstraw.objectives import (
    LossCounts,
    ObjectiveConfig,
    all_reduce_loss_counts,
    all_reduce_loss_statistics,
    compute_logprobs,
    loss_statistics,
    naive_logprobs,
    token_policy_loss,
)
from tests.support.ranks import fork_ranks

F64 = torch.float64


def draw(tokens, hidden_size, vocab_rows, vocab_size, dtype):
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, hidden_size, generator=generator, dtype=F64).to(dtype)
    weight = torch.randn(vocab_rows, hidden_size, generator=generator, dtype=F64).to(dtype)
    targets = torch.randint(0, vocab_size, (tokens,), generator=generator)
    return hidden, weight, targets, torch.randn(tokens, generator=generator, dtype=F64).to(dtype)


def check(rank, ranks, *, tokens, chunk, vocab_rows, vocab_size, temperature, sum_hidden_grad, entropy, dtype=F64):
    hidden, weight, targets, grad = draw(tokens, 5, vocab_rows, vocab_size, dtype)
    rtol = 1e-12 if dtype == F64 else 1e-5

    whole = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    expected = naive_logprobs(*whole, targets, temperature=temperature, vocab_size=vocab_size)
    expected.backward(grad)
    log_softmax = torch.log_softmax(hidden @ weight[:vocab_size].t() / temperature, -1)

    rows = slice(rank * vocab_rows // ranks, (rank + 1) * vocab_rows // ranks)
    part = [hidden.clone().requires_grad_(), weight[rows].clone().requires_grad_()]
    logprobs, got_entropy = compute_logprobs(
        *part, targets, tp_group=dist.group.WORLD, chunk_tokens=chunk, temperature=temperature, vocab_size=vocab_size,
        sum_hidden_grad_over_tp=sum_hidden_grad, with_entropy=True,
    )  # fmt: skip
    if not entropy:
        logprobs = compute_logprobs(
            *part, targets, tp_group=dist.group.WORLD, chunk_tokens=chunk, temperature=temperature,
            vocab_start=rows.start, vocab_size=vocab_size, sum_hidden_grad_over_tp=sum_hidden_grad,
        )  # fmt: skip
    logprobs.backward(grad)
    grad_hidden = part[0].grad
    if not sum_hidden_grad and tokens:
        dist.all_reduce(grad_hidden)  # the ranks' parts add up to the whole, hence were not summed before

    close = dict(rtol=rtol, atol=rtol)
    torch.testing.assert_close(logprobs, expected, **close)
    torch.testing.assert_close(got_entropy, -(log_softmax.exp() * log_softmax).sum(-1), **close)
    torch.testing.assert_close(grad_hidden, whole[0].grad, **close)
    torch.testing.assert_close(part[1].grad, whole[1].grad[rows], **close)


def check_large_logits(rank):
    """Shards whose maxima lie far apart: no overflow, and the far shard vanishes."""
    hidden = torch.ones(2, 1)
    weight = torch.tensor([[5000.0], [4999.0]]) if rank == 0 else torch.tensor([[-5000.0], [0.0]])
    logprobs = compute_logprobs(hidden, weight, torch.tensor([0, 3]), tp_group=dist.group.WORLD)
    expected = -torch.tensor([1 + torch.e**-1]).log()
    torch.testing.assert_close(logprobs, torch.cat([expected, expected - 5000]))


def check_nan_on_one_rank(rank):
    weight = torch.tensor([[torch.nan], [1.0]]) if rank == 1 else torch.ones(2, 1)
    for target in (0, 3):
        logprobs = compute_logprobs(torch.ones(1, 1), weight, torch.tensor([target]), tp_group=dist.group.WORLD)
        assert logprobs.isnan().all(), "a NaN of one rank's shard was hidden"


def check_sums_over_ranks(rank, ranks):
    counts = all_reduce_loss_counts(LossCounts(num_tokens=rank + 3, num_sequences=1), dist.group.WORLD)
    assert counts == LossCounts(num_tokens=7, num_sequences=2), counts

    generator = torch.Generator().manual_seed(0)
    logprobs, old, ref = torch.randn(3, 9, generator=generator)

    def statistics(tokens):
        result = token_policy_loss(
            logprobs[tokens], old[tokens], 1.0, config=ObjectiveConfig(), ref_logprobs=ref[tokens]
        )
        return loss_statistics(result)

    split = all_reduce_loss_statistics(statistics(slice(rank, None, ranks)), dist.group.WORLD).means()
    for name, value in statistics(slice(None)).means().items():
        assert abs(split[name] - value) <= 1e-5 * abs(value), (name, split[name], value)


def main(rank, ranks, _):
    for tokens, chunk in ((0, 4), (1, 4), (11, 1), (11, 4), (11, 16)):
        for vocab_size in (14, 9, 5):  # no padding, padding on the last rank, a rank of nothing but padding
            for temperature, flag in ((1.0, True), (0.6, False)):
                check(
                    rank, ranks, tokens=tokens, chunk=chunk, vocab_rows=14, vocab_size=vocab_size,
                    temperature=temperature, sum_hidden_grad=flag, entropy=flag,
                )  # fmt: skip
    check(
        rank, ranks, tokens=11, chunk=4, vocab_rows=14, vocab_size=13, temperature=1.0, sum_hidden_grad=True,
        entropy=False, dtype=torch.float32,
    )  # fmt: skip
    check_large_logits(rank)
    check_nan_on_one_rank(rank)
    check_sums_over_ranks(rank, ranks)


if __name__ == "__main__":
    fork_ranks(main)
