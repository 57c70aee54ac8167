"""What the sketch tests share: random matrices, a projection, a probe of the largest tensor that an operation makes."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longstraw.optim.projection import Projection


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def projection(rank, columns, **changes):
    return Projection(**(dict(name="w", rank=rank, columns=columns, seed=5, draw=2) | changes))


class LargestTensor(TorchDispatchMode):
    """The most elements of any tensor that an operation makes, views aside."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result
