"""Oracles of the engine: dense full-sequence autograd on the conventional model, independent of the engine and its tools.

A `Sequence` is a whole sequence of tokens with a weight on each predicted token; the loss is the weighted sum of negative
log-probabilities. `constant_prompt` turns the dense pass into that of `response_only`: it detaches, inside Megatron's own
modules, all that later tokens read of the first tokens (keys, values, latents, conv inputs, the delta rule's inputs).

B batch, S tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention


@dataclass(frozen=True)
class Sequence:
    """tokens [1, S]; weights [S - 1]: of -log p(tokens[t + 1] | tokens[: t + 1])."""

    tokens: torch.Tensor
    weights: torch.Tensor


def dense_loss(model, sequence: Sequence, *, temperature: float = 1.0, vocab_size: int | None = None) -> torch.Tensor:
    """The weighted sum of negative log-probabilities in one pass of a conventional model, with gradient."""
    ids, targets = sequence.tokens[:, :-1], sequence.tokens[0, 1:]
    mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)[None, None]
    logits = model(ids, None, mask)[0, :, :vocab_size] / temperature
    logprobs = logits.double().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return -(logprobs * sequence.weights).sum()


def dense_gradients(
    model, sequences: list[Sequence], *, temperature: float = 1.0, vocab_size: int | None = None
) -> tuple[float, dict[str, torch.Tensor]]:
    """The sum of the sequences' losses and its gradient, parameter by parameter, one sequence at a time."""
    model.zero_grad()
    loss = 0.0
    for sequence in sequences:
        term = dense_loss(model, sequence, temperature=temperature, vocab_size=vocab_size)
        term.backward()
        loss += term.item()
    return loss, take_gradients(model)


def take_gradients(model) -> dict[str, torch.Tensor]:
    """Every parameter's gradient, zero where there is none; leaves none behind."""
    grads = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()
    }
    model.zero_grad()
    return grads


def compare_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, dict[str, float]]:
    """Relative error over all parameters together, and of each parameter.

    A parameter whose gradient is below 1e-4 of the whole is held to that: a query that sees one key has no gradient but
    rounding.
    """
    assert found.keys() == expected.keys()
    error = {name: (found[name].double() - e.double()).norm().item() for name, e in expected.items()}
    norm = {name: e.double().norm().item() for name, e in expected.items()}
    whole = sum(x**2 for x in norm.values()) ** 0.5
    total = sum(x**2 for x in error.values()) ** 0.5 / whole
    return total, {name: error[name] / max(norm[name], 1e-4 * whole) for name in expected}


def _cut(x: torch.Tensor, tokens: int, dim: int) -> torch.Tensor:
    """x with its first `tokens` along `dim` detached."""
    return torch.cat([x.narrow(dim, 0, tokens).detach(), x.narrow(dim, tokens, x.shape[dim] - tokens)], dim)


@contextmanager
def constant_prompt(model, tokens: int) -> Iterator[None]:
    """In the block, later tokens read the first `tokens` tokens of a conventional model as constants."""
    undo = []

    def detach_keys(module, args, kwargs):
        query, key, value, *rest = args
        return (query, _cut(key, tokens, 0), _cut(value, tokens, 0), *rest), kwargs

    def detach_latents(module, args):
        query, latents = args
        return query, _cut(latents, tokens, 0)

    def detach_projection(module, args, output):
        return (_cut(output[0], tokens, 0), *output[1:])

    def constant_rule(rule):
        def apply(q, k, v, *, g, beta, **kwargs):
            return rule(*(_cut(t, tokens, 1) for t in (q, k, v)), g=_cut(g, tokens, 1), beta=_cut(beta, tokens, 1), **kwargs)

        return apply

    for module in model.modules():
        if isinstance(module, DotProductAttention):
            undo.append(module.register_forward_pre_hook(detach_keys, with_kwargs=True).remove)
        elif isinstance(module, DSAttention):
            undo.append(module.register_forward_pre_hook(detach_latents).remove)
        elif isinstance(module, GatedDeltaNet):
            undo.append(module.in_proj.register_forward_hook(detach_projection).remove)
            original = module.gated_delta_rule
            module.gated_delta_rule = constant_rule(original)
            undo.append(lambda module=module, original=original: setattr(module, "gated_delta_rule", original))
    try:
        yield
    finally:
        for step in undo:
            step()
