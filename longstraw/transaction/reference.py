"""Reference weights in host memory, swapped in to score.

The swap is element for element and leaves the policy's weights as they were, bit for bit. Only one prompt state may be
alive at a time, and a state belongs to the weights that made it: capture anew on each side of a swap.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from longstraw.prompt_state.residency import empty_resident


class ReferencePolicy:
    """A copy of the model's weights as they are now, kept on the host."""

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self._host = {}
        for name, parameter in model.named_parameters():
            held = empty_resident(tuple(parameter.shape), parameter.dtype, "host", parameter.device)
            self._host[name] = held.copy_(parameter.detach())

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
        for name, parameter in self._model.named_parameters():
            held = self._host[name]
            policy = parameter.detach().to("cpu", copy=True)
            parameter.copy_(held)
            held.copy_(policy)
