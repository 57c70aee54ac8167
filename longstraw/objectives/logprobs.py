"""Log-probabilities of target tokens, computed a few tokens at a time and, under tensor parallelism, over shards of
the vocabulary, so that no [T, V] tensor ever exists.

T tokens, C tokens of a chunk, h hidden size, V vocabulary rows on this rank.

Forward: for each chunk project [C, h] to logits [C, V], take their maximum, their sum of exponentials and the
target's logit, and drop them. Backward: project again, chunk by chunk. Saved in between are the inputs and two
numbers a token, the maximum and the logarithm of the sum; apart they are more accurate than their sum, the
log-sum-exp, is where logits are large.

Dtypes: the projection runs in the dtype of `hidden` (as Megatron's output layer does), the softmax in
`promote_types(dtype, float32)`, gradients come back in the inputs' dtypes. With several chunks the weight's gradient
is accumulated in the softmax dtype: a buffer as large as the weight, which a call of at most `chunk_tokens` tokens
does without.

Tensor parallelism: each rank holds the rows [vocab_start, vocab_start + V) of the output weight and all of `hidden`.
The ranks exchange one maximum and one sum for all T tokens after the last chunk, whatever the chunk size, so a rank
whose rows are all padding takes part like any other. All ranks of the group must be given the same T.

Left out: a bias in the output layer, label smoothing, gradients of the entropy, fused kernels.
"""

from dataclasses import dataclass
from typing import Optional, Union

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from longstraw.memory_scopes import memory_scope


def naive_logprobs(
    hidden: torch.Tensor,
    output_weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: Optional[int] = None,
) -> torch.Tensor:
    """The specification: log_softmax(hidden @ output_weight.T / temperature)[targets], whole vocabulary on one rank.

    Arguments and result as `compute_logprobs`.
    """
    logits = torch.nn.functional.linear(hidden, output_weight[:vocab_size])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return torch.log_softmax(logits, dim=-1).gather(-1, targets[:, None])[:, 0]


def compute_logprobs(
    hidden: torch.Tensor,
    output_weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    tp_group: Optional[dist.ProcessGroup] = None,
    chunk_tokens: int = 1024,
    temperature: float = 1.0,
    sum_hidden_grad_over_tp: bool = True,
    vocab_start: Optional[int] = None,
    vocab_size: Optional[int] = None,
    with_entropy: bool = False,
) -> Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Log-probability of each target token under softmax(hidden @ output_weight.T / temperature).

    Args:
        hidden: [T, h], the same on every rank of tp_group; T may be 0.
        output_weight: [V, h], this rank's rows, of hidden's dtype.
        targets: [T] int64 token ids of the whole vocabulary.
        tp_group: the ranks that share the vocabulary; None for one rank.
        chunk_tokens: tokens whose logits exist at once.
        temperature: divides the logits; the one that sampling used.
        sum_hidden_grad_over_tp: sum hidden's gradient over tp_group. False leaves each rank's part, for a caller
            whose own backward sums it, as the reduce-scatter of Megatron's sequence parallelism does.
        vocab_start: token id of this rank's first row; None takes rank * V.
        vocab_size: true size of the vocabulary; rows from there on are padding and have no probability. None takes
            every row for real.
        with_entropy: also return the entropy of each token's distribution, without gradient.

    Returns:
        [T] in promote_types(hidden.dtype, float32); with_entropy: a pair of those.

    Raises:
        ValueError: shapes or dtypes do not fit, a target lies outside the vocabulary, the temperature is not above 0.
    """
    if hidden.dim() != 2 or output_weight.dim() != 2 or hidden.shape[1] != output_weight.shape[1]:
        raise ValueError(
            f"hidden must be [T, h] and output_weight [V, h], got {list(hidden.shape)} and {list(output_weight.shape)}."
        )
    if hidden.dtype != output_weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} and output_weight {output_weight.dtype}: they must agree.")
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(f"targets must be [{len(hidden)}] int64, got {list(targets.shape)} {targets.dtype}.")
    if chunk_tokens < 1:
        raise ValueError(f"--logprob-chunk-tokens must be at least 1, got {chunk_tokens}.")
    if not 0.0 < temperature < float("inf"):
        raise ValueError(
            f"Log-probabilities need a temperature above 0, got {temperature}: with --sampling-temperature 0 a "
            "response is no sample of the policy."
        )

    ranks = 1 if tp_group is None else dist.get_world_size(tp_group)
    rows = output_weight.shape[0]
    if vocab_start is None:
        vocab_start = 0 if ranks == 1 else dist.get_rank(tp_group) * rows
    vocab_size = rows * ranks if vocab_size is None else vocab_size
    if not 0 < vocab_size <= rows * ranks:
        raise ValueError(f"vocab_size {vocab_size} does not fit {ranks} x {rows} rows of output_weight.")
    if targets.numel() and not bool(((targets >= 0) & (targets < vocab_size)).all()):
        raise ValueError(
            f"Targets must lie in [0, {vocab_size}), got {int(targets.min())} to {int(targets.max())}."
        )

    shard = _VocabShard(
        start=vocab_start, rows=min(max(vocab_size - vocab_start, 0), rows), group=tp_group if ranks > 1 else None
    )
    logprobs, entropy = _ChunkedLogprobs.apply(
        hidden, output_weight, targets, shard, chunk_tokens, float(temperature), sum_hidden_grad_over_tp, with_entropy
    )
    return (logprobs, entropy) if with_entropy else logprobs


@dataclass(frozen=True)
class _VocabShard:
    """The vocabulary rows of this rank: token ids [start, start + rows), padding left out."""

    start: int
    rows: int
    group: Optional[dist.ProcessGroup]

    def owned(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which targets are this rank's, and their rows (0 where they are not)."""
        own = (targets >= self.start) & (targets < self.start + self.rows)
        return own, torch.where(own, targets - self.start, 0)


class _ChunkedLogprobs(torch.autograd.Function):
    """`compute_logprobs` after its checks. Saves the inputs and the softmax statistics [T] of the whole vocabulary."""

    @staticmethod
    @memory_scope("logits")
    def forward(
        ctx, hidden, output_weight, targets, shard, chunk_tokens, temperature, sum_hidden_grad_over_tp, with_entropy
    ):
        local = _scan_shard(hidden, output_weight[: shard.rows], targets, shard, chunk_tokens, temperature, with_entropy)
        row_max, log_sum, logprobs, entropy = _combine_shards(*local, targets, shard)
        ctx.save_for_backward(hidden, output_weight, targets, row_max, log_sum)
        ctx.shard, ctx.chunk_tokens, ctx.temperature = shard, chunk_tokens, temperature
        ctx.sum_hidden_grad_over_tp = sum_hidden_grad_over_tp
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    @memory_scope("logits")
    def backward(ctx, grad_logprobs, _grad_entropy):
        hidden, output_weight, targets, row_max, log_sum = ctx.saved_tensors
        shard = ctx.shard
        weight = output_weight[: shard.rows]
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = None
        if needs_weight:
            # One chunk needs one rounding, hence no wider buffer.
            several = hidden.shape[0] > ctx.chunk_tokens
            grad_weight = torch.zeros_like(output_weight, dtype=row_max.dtype if several else output_weight.dtype)

        for start in range(0, hidden.shape[0] if shard.rows else 0, ctx.chunk_tokens):
            chunk = slice(start, start + ctx.chunk_tokens)
            grad_logits = _grad_logits(
                grad_logprobs[chunk], hidden[chunk], weight, targets[chunk], row_max[chunk], log_sum[chunk], shard,
                ctx.temperature,
            )  # fmt: skip
            if needs_hidden:
                torch.mm(grad_logits, weight, out=grad_hidden[chunk])
            if needs_weight and grad_weight.dtype == grad_logits.dtype:
                grad_weight[: shard.rows].addmm_(grad_logits.t(), hidden[chunk])
            elif needs_weight:
                grad_weight[: shard.rows] += grad_logits.t() @ hidden[chunk]

        if needs_hidden and ctx.sum_hidden_grad_over_tp and shard.group is not None and hidden.shape[0]:
            dist.all_reduce(grad_hidden, group=shard.group)
        if needs_weight:
            grad_weight = grad_weight.to(output_weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None


def _chunk_logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    """[C, V] in the softmax dtype, a tensor of its own."""
    logits = torch.mm(hidden, weight.t())
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(temperature)


def _scan_shard(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    shard: _VocabShard,
    chunk_tokens: int,
    temperature: float,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's part of each softmax, chunk by chunk.

    Returns four [T], z the logits of this rank's rows and m their maximum: m, sum exp(z - m), the target's z (0 where
    another rank has it), sum exp(z - m) (z - m) (0 unless with_entropy). Without rows m is -inf and the rest 0.
    """
    tokens = hidden.shape[0]
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    row_max = torch.full((tokens,), -torch.inf, dtype=dtype, device=hidden.device)
    row_sum, target_logit, weighted_sum = torch.zeros(3, tokens, dtype=dtype, device=hidden.device).unbind()
    for start in range(0, tokens if shard.rows else 0, chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        logits = _chunk_logits(hidden[chunk], weight, temperature)
        own, row = shard.owned(targets[chunk])
        target_logit[chunk] = torch.where(own, logits.gather(1, row[:, None])[:, 0], 0.0)
        row_max[chunk] = logits.amax(-1)
        logits.sub_(row_max[chunk, None])
        if with_entropy:
            exponentials = logits.exp()
            row_sum[chunk] = exponentials.sum(-1)
            weighted_sum[chunk] = exponentials.mul_(logits).sum(-1)
        else:
            row_sum[chunk] = logits.exp_().sum(-1)
    return row_max, row_sum, target_logit, weighted_sum


def _combine_shards(
    local_max: torch.Tensor,
    row_sum: torch.Tensor,
    target_logit: torch.Tensor,
    weighted_sum: torch.Tensor,
    targets: torch.Tensor,
    shard: _VocabShard,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """From each rank's part to the whole softmax: one maximum and one sum over the ranks, for all tokens at once.

    Returns four [T], m the maximum over the vocabulary: m, log sum exp(z - m), the target's log-probability, the
    entropy (meaningless unless weighted_sum was taken).
    """
    row_max = local_max
    if shard.group is not None and row_max.numel():
        row_max = local_max.clone()
        dist.all_reduce(row_max, op=dist.ReduceOp.MAX, group=shard.group)
    if shard.rows:
        own, _ = shard.owned(targets)
        shift = local_max - row_max
        rescale = shift.exp()
        parts = torch.stack(
            [
                row_sum * rescale,
                torch.where(own, target_logit - row_max, 0.0),
                (weighted_sum + row_sum * shift) * rescale,
            ]
        )
    else:
        parts = torch.zeros(3, *row_max.shape, dtype=row_max.dtype, device=row_max.device)
    if shard.group is not None and row_max.numel():
        dist.all_reduce(parts, group=shard.group)
    total, target_shifted, weighted = parts
    log_sum = total.log()
    return row_max, log_sum, target_shifted - log_sum, log_sum - weighted / total


def _grad_logits(
    grad_logprobs: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    row_max: torch.Tensor,
    log_sum: torch.Tensor,
    shard: _VocabShard,
    temperature: float,
) -> torch.Tensor:
    """Gradient by a chunk's projection [C, V]: (onehot(target) - softmax) * grad / temperature, in hidden's dtype."""
    logits = _chunk_logits(hidden, weight, temperature)
    softmax = logits.sub_(row_max[:, None]).sub_(log_sum[:, None]).exp_()
    own, row = shard.owned(targets)
    scale = (grad_logprobs.to(softmax.dtype) / temperature)[:, None]
    grad = softmax.mul_(-scale)
    grad.scatter_add_(1, row[:, None], torch.where(own[:, None], scale, 0.0))
    return grad.to(hidden.dtype)
