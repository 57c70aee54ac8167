"""The form of an operation's results (shape, strides, dtype), found under torch's FakeTensorMode once for each form of its
arguments, and remembered: a step repeats few forms many times.

Left out: results that share memory with arguments, which have no form of their own (`SHARED`).
"""

from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode


SHARED = "shared"
"""Instead of a form: the results are views of arguments, whatever the operation's schema says."""


class UnknownValue(RuntimeError):
    """A dry run asks for a number that only data has."""


@dataclass(frozen=True, slots=True)
class Form:
    """A tensor without its numbers."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    elements: int
    """Elements of a storage that holds it."""


def form_of(tensor: torch.Tensor) -> Form:
    """A tensor's form."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    elements = 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))
    return Form(shape, strides, tensor.dtype, elements)


def signature(func, args: tuple, kwargs: dict) -> tuple:
    """What decides the form of an operation's results."""
    return (func, _key_of(args), _key_of(tuple(kwargs.items()))) if kwargs else (func, _key_of(args))


class Forms:
    """What is known of operations so far. `found` counts the forms that were asked of FakeTensorMode."""

    def __init__(self):
        self.found = 0
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict = {}

    def find(self, key: tuple, func, args: tuple, kwargs: dict):
        """The results of an operation: Forms where it gives tensors, in a list where it gives several; others as they are.

        key: its `signature`. Raises UnknownValue where the form depends on the arguments' numbers.
        """
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = (self._ask(func, args, kwargs),)
        return known[0]

    def _ask(self, func, args, kwargs):
        self.found += 1
        with self._mode:
            args, kwargs = _map(_fake_of, args), {name: _map(_fake_of, value) for name, value in kwargs.items()}
            try:
                result = func(*args, **kwargs)
                if _storages(result) & _storages((args, list(kwargs.values()))):
                    return SHARED
                return _map(form_of, result)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise UnknownValue(
                    f"{func} gives something whose shape depends on activations, which a dry run does not have: it needs a form "
                    "of its own in longstraw.dry_run.kernels"
                ) from error


def _storages(tree) -> set[int]:
    if isinstance(tree, torch.Tensor):
        return {tree.untyped_storage()._cdata}
    return set().union(*map(_storages, tree)) if isinstance(tree, (list, tuple)) else set()


def _fake_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _map(function, tree):
    if isinstance(tree, torch.Tensor):
        return function(tree)
    return [_map(function, item) for item in tree] if isinstance(tree, (list, tuple)) else tree


def _key_of(tree):
    """Something hashable that two trees share exactly where an operation gives the same forms for both."""
    if isinstance(tree, torch.Tensor):
        return tree.shape, tree.stride(), tree.dtype
    if isinstance(tree, (list, tuple)):
        return tuple([_key_of(item) for item in tree])
    # 1, 1.0 and True are equal as keys, and give different dtypes
    return (type(tree), tree) if isinstance(tree, (int, float)) else tree
