"""Reference weights in host memory, swapped in to score.

The swap is element for element and leaves the policy's weights as they were, bit for bit. Only one prompt state may be
alive at a time, and a state belongs to the weights that made it: capture anew on each side of a swap.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from longstraw.memory_scopes import memory_scope
from longstraw.prompt_state.residency import empty_resident


def named_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What makes a model the function it is: parameters, and buffers that are saved (biases of experts)."""
    saved = model.state_dict(keep_vars=True).keys()
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


class ReferencePolicy:
    """A copy of the model's weights as they are now, kept on the host."""

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self._host = {}
        for name, weight in named_weights(model):
            with memory_scope("reference"):
                held = empty_resident(tuple(weight.shape), weight.dtype, "host", weight.device)
            self._host[name] = held.copy_(weight.detach())

    def count_bytes(self) -> int:
        """Of the copy, in host memory."""
        return sum(held.nbytes for held in self._host.values())

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """While inside, the model has the reference weights and the host holds the policy's."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights of model and host, element for element."""
        for name, weight in named_weights(self._model):
            held = self._host[name]
            policy = weight.detach().to("cpu", copy=True)
            weight.copy_(held)
            held.copy_(policy)
