"""The oracle of the indexer's loss: added to a dense pass of Megatron's own DSAttention, inside its forward.

The terms are put together from Megatron's functions (index scores, selection, normalised target, divergence), with a
weight for each row, which Megatron has not. `dense_as_megatron` is Megatron's own training path: every row weighs 1.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.transformer.experimental_attention_variant import dsa, dsa_indexer_loss
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention

from longstraw.patches.float64 import lift_float64
from tests.support.dense import Sequence, dense_loss, take_gradients


def _layer_loss(module: DSAttention, query, key, x, qr, row_weights: torch.Tensor, constant: int) -> torch.Tensor:
    """query [s, b, H, D], key [s, b, 1, D], row_weights [s]; index keys of the first `constant` tokens are constants."""
    q, k, weights = module.indexer.forward_before_topk(x.detach(), qr.detach())
    k = torch.cat([k[:constant].detach(), k[constant:]])
    rows, relu = len(q), module.config.dsa_indexer_scoring_relu
    causal = torch.full((rows, rows), -torch.inf, dtype=q.dtype).triu(1)
    _, chosen = dsa.fused_qk_topk_naive(q, k, weights, module.index_topk, mask=causal, use_relu=relu)
    mask = torch.zeros(1, rows, rows + 1, dtype=torch.bool).scatter_(2, chosen.masked_fill(chosen < 0, rows), True)
    mask = mask[..., :rows]
    main = torch.einsum("sbhd,tbd->bhst", query, key[:, :, 0]).detach() * module.softmax_scale
    main = main.masked_fill(~mask[:, None], -torch.inf).softmax(-1).sum(1)
    target = dsa_indexer_loss.normalize_indexer_target(main)
    scores = dsa._compute_index_scores(q, weights, k, use_relu=relu)
    log_q = scores.masked_fill(~mask, -torch.inf).log_softmax(-1)
    return (dsa_indexer_loss.indexer_kl_per_row(target, log_q.masked_fill(~mask, 0.0), mask)[0] * row_weights).sum()


@contextmanager
def indexer_losses(model, row_weights: torch.Tensor, *, constant: int = 0) -> Iterator[list[torch.Tensor]]:
    """In the block, each computing layer's forward appends its loss to the list; row_weights [S] of the sequence's rows."""
    terms: list[torch.Tensor] = []

    def take(module, args, kwargs, output):
        query, key = args[:2]
        if module.indexer is not None:
            terms.append(_layer_loss(module, query, key, kwargs["x"], kwargs["qr"], row_weights, constant))

    layers = [module for module in model.modules() if isinstance(module, DSAttention)]
    undo = [layer.register_forward_hook(take, with_kwargs=True) for layer in layers]
    try:
        yield terms
    finally:
        for hook in undo:
            hook.remove()


def dense_with_indexer(
    model, sequences: list[Sequence], coefficient: float, *, constant: int = 0, vocab_size: int | None = None
) -> tuple[float, float, dict[str, torch.Tensor]]:
    """(loss, the indexer's loss, gradients of both) of a conventional model; rows weigh as much as their tokens' losses,
    without the sign."""
    model.zero_grad()
    loss, added = 0.0, 0.0
    for sequence in sequences:
        with indexer_losses(model, coefficient * sequence.weights.abs(), constant=constant) as terms:
            main = dense_loss(model, sequence, vocab_size=vocab_size)
            extra = torch.stack(terms).sum()
            (main + extra).backward()
        loss, added = loss + main.item(), added + extra.item()
    return loss, added, take_gradients(model)


def dense_as_megatron(model, sequence: Sequence, coefficient: float, vocab_size: int) -> dict[str, torch.Tensor]:
    """Gradients of a training pass to which Megatron adds its own loss of the indexer: of all rows, without a normaliser."""
    model.zero_grad()
    with _megatron_loss(model, coefficient):
        loss = dense_loss(model, sequence, vocab_size=vocab_size)
        loss.backward()
    return take_gradients(model)


@contextmanager
def _megatron_loss(model, coefficient: float) -> Iterator[None]:
    config, trained = model.config, model.training
    before = config.dsa_indexer_loss_coeff, config.dsa_indexer_use_sparse_loss
    configs = {id(c): c for c in [config, *(m.config for m in model.modules() if isinstance(m, DSAttention))]}
    for c in configs.values():
        c.dsa_indexer_loss_coeff, c.dsa_indexer_use_sparse_loss = coefficient, True
    model.train()
    original = dsa.bwd_fused_indexer_loss_naive

    def backward(*args, **kwargs):
        with lift_float64():  # a mode is off inside `loss.backward`
            return original(*args, **kwargs)

    dsa.bwd_fused_indexer_loss_naive = backward
    try:
        yield
    finally:
        dsa.bwd_fused_indexer_loss_naive = original
        for c in configs.values():
            c.dsa_indexer_loss_coeff, c.dsa_indexer_use_sparse_loss = before
        model.train(trained)
