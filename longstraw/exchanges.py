"""Exchanges between ranks, counted as they are made: calls and bytes of each collective by group.

    counts = ExchangeCounts(name_group)
    with watch_exchanges(counts.add):
        ...                                  # a training step, on this rank
    counts.totals                            # (group, operation) -> Exchange

Whatever function of torch.distributed starts a collective, under whatever name it was imported and on whatever thread (a
backward has its own), it ends in a method of `ProcessGroup`; those are wrapped while a block runs. That costs some ten
microseconds a call, and no tensor is touched. A dry run counts its fake exchanges in the same way.

Bytes are those of the rank's larger buffer: what is gathered, or what is reduced, scattered, sent or exchanged.

Left out: barriers, which carry nothing; Python objects (`all_gather_object` and the like), whose pickles have the size of their
text; and what C++ starts by itself (functional collectives, torch's own DistributedDataParallel), which nothing here uses.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist

OPERATIONS = {
    "all_reduce": ("allreduce", "allreduce_coalesced"),
    "all_gather": (
        "allgather", "_allgather_base", "all_gather_single", "allgather_coalesced", "all_gather_single_coalesced",
        "allgather_into_tensor_coalesced",
    ),
    "reduce_scatter": (
        "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_single_coalesced",
        "reduce_scatter_tensor_coalesced",
    ),
    "all_to_all": ("alltoall", "alltoall_base", "all_to_all_single"),
    "broadcast": ("broadcast",), "reduce": ("reduce",), "gather": ("gather",), "scatter": ("scatter",),
    "send": ("send",), "recv": ("recv", "recv_anysource"),
}
"""Operation, as receipts call it -> methods of ProcessGroup that start one. torch's versions do not all have the same."""

OBJECT_FUNCTIONS = (
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list", "recv_object_list",
)

Listener = Callable[[dist.ProcessGroup, str, int], None]
"""Told of each collective before it starts: the group, the operation, the bytes."""


@dataclass
class Exchange:
    """What one kind of exchange over one group came to."""

    calls: float = 0
    bytes: float = 0


class ExchangeCounts:
    """Totals since it was made. name_group: a process group -> its name."""

    def __init__(self, name_group: Callable[[dist.ProcessGroup], str]):
        self.name_group = name_group
        self.totals: dict[tuple[str, str], Exchange] = {}
        self._names: dict[str, str] = {}  # torch's name of a group -> ours

    def add(self, group: dist.ProcessGroup, operation: str, size: int) -> None:
        """Count one collective."""
        name = self._names.get(group.group_name)
        if name is None:
            name = self._names[group.group_name] = self.name_group(group)
        total = self.totals.get((name, operation))
        if total is None:
            total = self.totals[name, operation] = Exchange()
        total.calls += 1
        total.bytes += size


_local = threading.local()
"""Of each thread: whether it exchanges Python objects."""


@contextmanager
def watch_exchanges(listener: Listener) -> Iterator[None]:
    """A block in which `listener` is told of every collective of this process. Blocks may lie in each other: all are told."""
    with ExitStack() as stack:
        for operation, methods in OPERATIONS.items():
            for method in methods:
                if (original := getattr(dist.ProcessGroup, method, None)) is not None:
                    told = _tell(original, operation, listener)
                    stack.enter_context(mock.patch.object(dist.ProcessGroup, method, told))
        for name in OBJECT_FUNCTIONS:
            stack.enter_context(mock.patch.object(dist, name, _unseen(getattr(dist, name))))
        yield


def _tell(original: Callable, operation: str, listener: Listener) -> Callable:
    @functools.wraps(original)
    def started(group, *args, **kwargs):
        if not getattr(_local, "objects", False):
            size = 0
            for item in (*args, *kwargs.values()) if kwargs else args:
                size = max(size, _bytes(item))
            listener(group, operation, size)
        return original(group, *args, **kwargs)

    return started


def _unseen(original: Callable) -> Callable:
    @functools.wraps(original)
    def exchange_objects(*args, **kwargs):
        before, _local.objects = getattr(_local, "objects", False), True
        try:
            return original(*args, **kwargs)
        finally:
            _local.objects = before

    return exchange_objects


def _bytes(tree) -> int:
    if isinstance(tree, torch.Tensor):
        return tree.nbytes
    return sum([_bytes(item) for item in tree]) if isinstance(tree, (list, tuple)) else 0
