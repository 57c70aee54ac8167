"""A model whose projection matrices are under LoGRA: what their linears multiply in training and in probes.

In training a sketched linear adds to its sketch in the backward (`sketched_linear`). In a probe every linear multiplies by
W - step D. A matrix that latent attention reads without calling its linear cannot do either: its gradient is formed for
one block, sketched and dropped, and in a probe its layer gets the moved matrix for the time of its forward.

Left out: dense directions in training, whose gradients are DDP's.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from longstraw.optim.sketch import sketched_linear
from longstraw.optim.updated_weight import UpdatedWeight
from longstraw.patches.projections import (
    ProjectionMatrix, replace_dual_product, replace_product, restore_product,
)


class UpdatedModel:
    """The (matrix, weight) pairs of one model."""

    def __init__(self, model: torch.nn.Module, pairs: list[tuple[ProjectionMatrix, UpdatedWeight]]):
        self.model, self.pairs = model, pairs
        self._owners = {
            id(matrix.weight): module for matrix, _ in pairs if not matrix.called for module in _readers(model, matrix)
        }

    def attach(self) -> list:
        """Let every sketched matrix add its gradients to its sketch from now on. After DDP is built: it has no buffer for
        them. Returns the handles of the hooks on matrices that are only read."""
        hooks = []
        for matrix, weight in self.pairs:
            if weight.sketch is None:
                continue
            if matrix.called:
                replace_product(matrix, _training_product(weight))
            else:
                matrix.weight.requires_grad_(True)
                hooks.append(matrix.weight.register_post_accumulate_grad_hook(_sketch_and_drop(weight)))
        return hooks

    @contextmanager
    def moved(self, step: float | torch.Tensor) -> Iterator[None]:
        """While inside, the model computes with W - step D. Step 0.0: with the weights as they are.

        Raises ValueError for a dual number where a matrix is read without calling its linear.
        """
        if isinstance(step, float) and step == 0.0:
            yield
            return
        with ExitStack() as stack:
            for matrix, weight in self.pairs:
                if matrix.called:
                    stack.callback(self._restore, matrix, weight)
                    replace = replace_dual_product if torch.is_tensor(step) else replace_product
                    replace(matrix, lambda x, w, weight=weight: weight.product(x, w, step))
                elif torch.is_tensor(step):
                    raise ValueError(f"--kl-probe jvp cannot follow {matrix.name}: use --kl-probe finite-difference")
                else:
                    stack.enter_context(_moved_while_read(self._owners[id(matrix.weight)], matrix, weight, step))
            yield

    def _restore(self, matrix: ProjectionMatrix, weight: UpdatedWeight) -> None:
        restore_product(matrix)
        if weight.sketch is not None:
            replace_product(matrix, _training_product(weight))


def _readers(model: torch.nn.Module, matrix: ProjectionMatrix) -> list[torch.nn.Module]:
    """The layer that reads a matrix: the module whose child its linear is."""
    return [module for module in model.modules() if any(child is matrix.module for child in module.children())]


def _training_product(weight: UpdatedWeight):
    return lambda x, w: sketched_linear(x, w, weight.sketch)


def _sketch_and_drop(weight: UpdatedWeight):
    def hook(parameter: torch.nn.Parameter) -> None:
        weight.sketch.add_gradient(parameter.grad)
        parameter.grad = None

    return hook


@contextmanager
def _moved_while_read(reader: torch.nn.Module, matrix: ProjectionMatrix, weight: UpdatedWeight, step: float):
    """Hooks around the reader's forward that put W - step D in the parameter's place and W back."""
    held: list[torch.Tensor] = []

    def put(*_) -> None:
        held.append(matrix.weight.data)
        matrix.weight.data = weight.moved_weight(step)

    def put_back(*_) -> None:
        matrix.weight.data = held.pop()

    hooks = [reader.register_forward_pre_hook(put), reader.register_forward_hook(put_back, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
