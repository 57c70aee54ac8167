"""Where state lives, and how pages that live on the host come to the device for one layer at a time.

Host buffers are pinned where there is a CUDA device. `Staging` keeps the copies of at most two layers on the device:
the one being computed and the one being fetched, on a side stream. Without a CUDA device "host" and "device" are the
same memory; the copies are made all the same, so that what runs here is what runs there.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

import torch

from longstraw.memory_scopes import memory_scope

Residency = Literal["device", "host"]


def empty_resident(shape: tuple[int, ...], dtype: torch.dtype, residency: Residency, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor on `device`, or in (pinned) host memory."""
    with memory_scope(place=residency):
        if residency == "device":
            return torch.empty(shape, dtype=dtype, device=device)
        return torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())


def zeros_resident(shape: tuple[int, ...], dtype: torch.dtype, residency: Residency, device: torch.device) -> torch.Tensor:
    """As `empty_resident`, filled with zeros."""
    return empty_resident(shape, dtype, residency, device).zero_()


def bring(tensor: torch.Tensor, residency: Residency, device: torch.device) -> torch.Tensor:
    """State that lives at `residency`, on the compute device: the tensor itself where it lives there, else a copy."""
    if residency == "device":
        return tensor
    with memory_scope("staging", "device"):
        return copy_across(tensor, device)


def take_home(tensor: torch.Tensor, residency: Residency, home: torch.device) -> torch.Tensor:
    """A tensor of the compute device where state of that residency lives, on device `home`."""
    if residency == "device":
        return tensor
    with memory_scope("staging", "host"):
        return copy_across(tensor, home)


def copy_across(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the other side; without a CUDA device both sides are the same memory, and it is the tensor itself."""
    return tensor.to(device)


@dataclass(frozen=True)
class _Copy:
    layer: int
    rows: int
    tensors: tuple[torch.Tensor, ...]


class Staging:
    """Device copies of host pages, of at most `limit` layers at a time, oldest out first."""

    def __init__(self, device: torch.device, limit: int = 2):
        self.device, self.limit = device, limit
        self.fetched = self.late = 0  # fetches, and those of what no prefetch had asked for: the device waits for each
        self._copies: OrderedDict[int, _Copy] = OrderedDict()
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None

    def fetch(self, owner: int, rows: int, sources: tuple[torch.Tensor, ...], layer: int) -> tuple[torch.Tensor, ...]:
        """Device copies of `sources`; owner and rows name them (the same owner with more rows is copied anew)."""
        held = self._copies.get(owner)
        self.fetched += 1
        self.late += held is None or held.rows != rows
        self.prefetch(owner, rows, sources, layer)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        return self._copies[owner].tensors

    def prefetch(self, owner: int, rows: int, sources: tuple[torch.Tensor, ...], layer: int) -> None:
        """Start copying what `fetch` will ask for next."""
        held = self._copies.get(owner)
        if held is None or held.rows != rows:
            self._copies.pop(owner, None)
            self._make_room(layer)
            self._copies[owner] = _Copy(layer, rows, self._copy(sources))
        self._copies.move_to_end(owner)

    def _make_room(self, layer: int) -> None:
        """Drop the copies of the layer used longest ago, until `layer` is one of at most `limit`."""
        while len({copy.layer for copy in self._copies.values()} | {layer}) > self.limit:
            oldest = next(copy.layer for copy in self._copies.values() if copy.layer != layer)
            self._copies = OrderedDict((o, copy) for o, copy in self._copies.items() if copy.layer != oldest)

    @memory_scope("staging", "device")
    def _copy(self, sources: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if self._stream is None:
            copies = tuple(copy_across(t, self.device) for t in sources)
            return tuple(c.clone() if c is t else c for c, t in zip(copies, sources))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copies = tuple(t.to(self.device, non_blocking=True) for t in sources)
        for copy in copies:
            copy.record_stream(torch.cuda.current_stream())
        return copies

    def drop(self, owner: int) -> None:
        """Forget an owner's copies, which its release has made stale."""
        self._copies.pop(owner, None)

    def staged(self) -> dict[int, int]:
        """Bytes staged now, by owner."""
        return {
            owner: sum(t.numel() * t.element_size() for t in copy.tensors) for owner, copy in self._copies.items()
        }
