"""A tracker under which tensors that follow from weights or activations have a shape and no numbers.

Whatever is small and follows from the run's own numbers alone (token counts, positions, masks, lengths) is computed as ever.
Anything else is shape only: its tensor is an ordinary CPU tensor, so autograd and the program see nothing unusual, but its
storage is a window on one stretch of address space that nobody ever touches; operations on it are not run. The form of their
results is asked of torch's FakeTensorMode (`forms`). A tensor into which an operation writes something without numbers has
none from then on.

Programs read some numbers all the same. What is known is given; where it is not, they get an ordinary answer: true (a check
passes), or a small positive number (a norm, a loss, a divergence). An unknown integer would decide a shape in a block, and
raises there, unless somebody has said what to answer (`answers`); between blocks it counts what is wrong, and is 0
(`counts_faults`).

Collectives do nothing to tensors without numbers; among fake ranks of equal numbers, those of known ones stay as they are.
"""

import functools
import mmap
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from unittest import mock

import torch
from torch.distributed._meta_registrations import create_fakework

from longstraw.dry_run.forms import SHARED, Form, Forms, UnknownValue, signature
from longstraw.dry_run.tracker import MemoryTracker

ORDINARY = 1e-6
"""The answer to a question for an unknown real number."""

MAKES_NUMBERS = 2**22
"""Bytes up to which zeros, ranges and the like hold numbers from the start."""

GATHERS_NUMBERS = 2**16
"""Bytes up to which an empty tensor has memory of its own."""

_aten, _c10d = torch.ops.aten, torch.ops.c10d
_MASKED = {_aten.index.Tensor, _aten.index_put_.default, _aten._index_put_impl_.default, _aten.index_put.default}
_WORK_ALONE = {"alltoall_base_", "reduce_", "gather_", "barrier", "send", "recv_", "allreduce_coalesced_",
               "allgather_coalesced_", "allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_"}
"""Collectives that return a handle to wait for and nothing else."""
FORBIDDEN = {_aten._safe_softmax.default}
"""What no run at length would do: torch's attention by matrix products comes to its softmax of all scores."""

WORKSPACES = {
    # sums of dQ and of dO O, in float32
    _aten._scaled_dot_product_flash_attention_backward.default: lambda args: 4 * args[1].numel() + 8 * args[1][..., 0].numel(),
}
"""Bytes that a kernel needs while it runs beside its results, by operation."""

_GATHER = _c10d._allgather_base_.default
_NORESERVE = 0x4000  # MAP_NORESERVE, which the mmap module does not name
_SPACE = 2**45


class ShapesOnly(MemoryTracker):
    """See the module. counts_faults: whether an unknown integer is a count of faults, 0, rather than an error. answers: to the
    next questions for unknown integers, in order."""

    def __init__(self):
        super().__init__()
        self.forms, self.counts_faults = Forms(), True
        self.answers: deque[int] = deque()
        self._ways: dict[object, _Way] = {}
        self._space = mmap.mmap(-1, _SPACE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        self._address = torch.frombuffer(self._space, dtype=torch.uint8, count=1).data_ptr()

    def __enter__(self):
        self._patches = ExitStack()
        # These two read memory without an operation.
        self._patches.enter_context(mock.patch.object(torch.Tensor, "tolist", self._list_by_items(torch.Tensor.tolist)))
        self._patches.enter_context(mock.patch.object(torch, "tensor", _tensor_by_items(torch.tensor)))
        return super().__enter__()

    def __exit__(self, *exc):
        self._patches.close()
        return super().__exit__(*exc)

    def _list_by_items(self, read):
        @functools.wraps(read)
        def tolist(tensor):
            if self.holds_numbers(tensor):
                return read(tensor)
            return [part.tolist() for part in tensor] if tensor.dim() else tensor.item()

        return tolist

    def holds_numbers(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's numbers are those that the program would compute."""
        held = self._held.get(tensor.untyped_storage()._cdata)
        return held is None or held.real

    def perform(self, func, args: tuple, kwargs: dict):
        """The results: real where all arguments are, else shapes."""
        way = self._ways.get(func)
        if way is None:
            way = self._ways[func] = _Way.of(func)
        kind = way.kind
        if kind == "run":
            return func(*args, **kwargs)
        if kind == "makes":
            return self._make(func, args, kwargs)
        unreal, host = self._look_at(args)
        if kwargs:
            more = self._look_at(kwargs.values())
            unreal, host = unreal or more[0], host + more[1]
        if not unreal:
            return func(*args, **kwargs)
        if kind == "read":
            return self._answer(args[0])
        if kind == "exchange":
            if func is _GATHER and self.holds_numbers(args[1]) and self._is_private(args[0]):
                self._held[args[0].untyped_storage()._cdata].real = True
                return func(*args, **kwargs)
            self.take_numbers(args)  # their schemas do not say what they write into
            return create_fakework(args, return_first_arg=way.name not in _WORK_ALONE)
        if kind == "forbidden":
            raise UnknownValue(f"the step reaches {func}, which no run at length would: it is not costed")
        if kind == "masked":
            args = self._without_masks(args)
        key = signature(func, args, kwargs)
        results = self._give(key, func, way, args, kwargs)
        if self.counter is not None:
            self.counter.see(key, func, args, results, on_host=host)
        if func in WORKSPACES:
            self.hold_for_a_moment(WORKSPACES[func](args))
        return results

    def _look_at(self, arguments) -> tuple[bool, list[bool]]:
        """Whether some tensor has no numbers; for each tensor, whether it lies on the host."""
        unreal, host = False, []
        for tensor in _tensors_of(arguments):
            held = self._held.get(tensor.untyped_storage()._cdata)
            if held is None:
                host.append(False)
                continue
            host.append(held.place == "host")
            if not held.real:
                unreal = True
        return unreal, host

    def _make(self, func, args, kwargs):
        form = self.forms.find(signature(func, args, kwargs), func, args, kwargs)
        size = form.elements * form.dtype.itemsize if isinstance(form, Form) else MAKES_NUMBERS + 1
        if func._schema.name.startswith("aten::empty"):
            if size > GATHERS_NUMBERS:
                return self._map_forms(form)
            made = func(*args, **kwargs)  # memory of its own, in which ranks may gather numbers
            self.count(made.untyped_storage(), real=False)
            return made
        return func(*args, **kwargs) if size <= MAKES_NUMBERS else self._map_forms(form)

    def _is_private(self, tensor: torch.Tensor) -> bool:
        return not 0 <= tensor.untyped_storage().data_ptr() - self._address < _SPACE

    def _give(self, key: tuple, func, way: "_Way", args, kwargs):
        """Results of an operation that is not run: what it writes into, or new tensors without numbers."""
        if not way.writes:
            forms = self.forms.find(key, func, args, kwargs)
            return func(*args, **kwargs) if forms is SHARED else self._map_forms(forms)
        written = self._write(way, args, kwargs)
        if not way.returns:
            return None
        if None in way.returns:
            forms = self.forms.find(key, func, args, kwargs)
            forms = forms if isinstance(forms, list) else [forms]
        else:
            forms = way.returns
        found = [
            self._map_forms(form) if alias is None else written[alias] for alias, form in zip(way.returns, forms)
        ]
        return found[0] if len(found) == 1 else tuple(found)

    def _write(self, way: "_Way", args, kwargs) -> dict[str, object]:
        """Take the numbers of what an operation writes into; gives these arguments by the name of their alias."""
        written = {}
        for position, name, alias in way.writes:
            given = args[position] if position < len(args) else kwargs.get(name)
            written[alias] = given
            self.take_numbers((given,))
        return written

    def take_numbers(self, tree) -> None:
        """From here on these tensors have a shape only."""
        for tensor in _tensors_of(tree):
            held = self._held.get(tensor.untyped_storage()._cdata)
            if held is None:
                self.count(tensor.untyped_storage(), real=False)
            else:
                held.real = False

    def _answer(self, tensor: torch.Tensor):
        if tensor.dtype == torch.bool:
            return True
        if tensor.dtype.is_floating_point:
            return ORDINARY
        if self.answers:
            return self.answers.popleft()
        if self.counts_faults:
            return 0
        raise UnknownValue(
            "the step reads an integer that depends on activations, which a dry run does not have: what reads it needs a form "
            "of its own in longstraw.dry_run.kernels"
        )

    def _without_masks(self, args):
        """Known boolean masks as the numbers of their true entries."""
        indices = []
        for index in args[1]:
            if index is not None and index.dtype == torch.bool:
                if not self.holds_numbers(index):
                    raise UnknownValue("the step picks by a mask that depends on activations")
                indices += index.nonzero().unbind(1)
            else:
                indices.append(index)
        return (args[0], indices, *args[2:])

    def _map_forms(self, tree):
        if isinstance(tree, Form):
            return self._open(tree)
        return [self._map_forms(item) for item in tree] if isinstance(tree, list) else tree

    def _open(self, form: Form) -> torch.Tensor:
        elements = form.elements
        if elements:
            flat = torch.frombuffer(self._space, dtype=form.dtype, count=elements)
        else:
            flat = torch.empty(0, dtype=form.dtype)
        self.count(flat.untyped_storage(), real=False)
        return flat.as_strided(form.shape, form.strides)


def _tensor_by_items(make):
    @functools.wraps(make)
    def tensor(data, *args, **kwargs):
        return make(_ask_items(data), *args, **kwargs)

    return tensor


def _ask_items(data):
    if isinstance(data, torch.Tensor):
        return data.item() if data.dim() == 0 else data
    return [_ask_items(item) for item in data] if isinstance(data, (list, tuple)) else data


@dataclass(frozen=True, slots=True)
class _Way:
    """How an operation is treated, read from its schema once.

    writes: (position, name, alias) of the arguments it writes into. returns: for each result the alias of the argument that it
    is, or None where it is new.
    """

    kind: str
    name: str
    writes: tuple[tuple[int, str, str], ...]
    returns: tuple[str | None, ...]

    @classmethod
    def of(cls, func) -> "_Way":
        """That of an operation."""
        schema = func._schema
        writes = tuple(
            (position, argument.name, _alias_of(argument))
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        returns = tuple(map(_alias_of, schema.returns))
        return cls(_kind_of(func), schema.name.partition("::")[2], writes, returns)


def _alias_of(item) -> str | None:
    """The alias of an argument or a result; None where it has none of its own."""
    return None if item.alias_info is None else next(iter(item.alias_info.before_set), None)


def _kind_of(func) -> str:
    """How an operation is treated."""
    schema = func._schema
    if func.namespace == "c10d":
        return "exchange"
    if func is _aten._local_scalar_dense.default:
        return "read"
    if func in FORBIDDEN:
        return "forbidden"
    if func in _MASKED:
        return "masked"
    if torch.Tag.inplace_view in func.tags or any(item.alias_info is not None and not item.alias_info.is_write for item in schema.returns):
        return "run"
    if any("Tensor" in str(argument.type) for argument in schema.arguments if argument.name != "out"):
        return "plain"
    return "makes" if any("Tensor" in str(item.type) for item in schema.returns) else "run"


def _tensors_of(tree):
    for leaf in tree:
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, (list, tuple)):
            yield from _tensors_of(leaf)
