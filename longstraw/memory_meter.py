"""How much tensor memory a piece of work holds at its peak.

Two readings. `StorageMeter` counts every tensor storage that the work makes, from its first use until it is freed: the
same program gives the same number on every run and machine, but each operation costs some Python, so give it a pass of
its own. `read_peak_bytes` is free: on CUDA the allocator's own peak, on the CPU the process's peak resident memory, which
includes libraries and what the allocator has not handed back.

Left out: memory inside a kernel, which no tensor holds, and tensors made in another thread.
"""

import resource
import sys
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageMeter(TorchDispatchMode):
    """`with StorageMeter() as meter:` then `meter.peak_bytes`: the peak of live storages made inside the block.

    A storage counts once however many tensors view it, with its size when last seen, from the operation that made it
    until its last tensor is gone, in the backward as in the forward. Storages made before the block never count, also
    when they are read or written inside it.
    """

    def __init__(self):
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._counted: dict[int, tuple[weakref.ref, int]] = {}
        self._older: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not torch.ops.aten.lift_fresh.default:  # its input is the new tensor itself, of torch.tensor(...)
            for storage in _storages((args, kwargs)):
                self._see_input(storage)
        result = func(*args, **kwargs)
        for storage in _storages((result, kwargs.get("out"))):
            self._count(storage)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result

    def _see_input(self, storage: torch.UntypedStorage) -> None:
        """A storage first seen as an input was made outside the block."""
        key = storage._cdata
        if key not in self._counted and key not in self._older:
            self._older[key] = weakref.ref(storage, lambda _: self._older.pop(key, None))

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._older:
            return
        held = self._counted.get(key)
        if held is None:
            self._counted[key] = (weakref.ref(storage, lambda _: self._forget(key)), size)
            self.live_bytes += size
        elif held[1] != size:  # an `out=` or resize_ has grown it
            self._counted[key] = (held[0], size)
            self.live_bytes += size - held[1]

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._counted.pop(key)[1]


def _storages(tree) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def reset_peak_bytes() -> None:
    """Start a new peak for `read_peak_bytes`, where there is one to start: a CUDA device's."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def read_peak_bytes() -> int:
    """The peak without any cost: bytes that tensors held on the CUDA device since `reset_peak_bytes`, else resident
    bytes of the process since it started."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else read_peak_rss_bytes()


def read_peak_rss_bytes() -> int:
    """Peak resident memory of this process since it started."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
