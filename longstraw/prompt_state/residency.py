"""Where state lives, and how pages that live on the host come to the device for one layer at a time.

Host buffers are pinned where there is a CUDA device. `Staging` keeps the copies of at most two layers on the device:
the one being computed and the one being fetched, on a side stream. Without a CUDA device "host" and "device" are the
same memory; the copies are made all the same, so that what runs here is what runs there.
"""

from collections import OrderedDict
from typing import Literal

import torch

Residency = Literal["device", "host"]


def empty_resident(shape: tuple[int, ...], dtype: torch.dtype, residency: Residency, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor on `device`, or in (pinned) host memory."""
    if residency == "device":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())


def zeros_resident(shape: tuple[int, ...], dtype: torch.dtype, residency: Residency, device: torch.device) -> torch.Tensor:
    """As `empty_resident`, filled with zeros."""
    return empty_resident(shape, dtype, residency, device).zero_()


class Staging:
    """Device copies of host pages, of at most `limit` owners (a layer's pages each) at a time, oldest out first."""

    def __init__(self, device: torch.device, limit: int = 2):
        self.device, self.limit = device, limit
        self._copies: OrderedDict[int, tuple[int, tuple[torch.Tensor, ...]]] = OrderedDict()
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None

    def fetch(self, owner: int, rows: int, sources: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Device copies of `sources`; owner and rows name them (the same owner with more rows is copied anew)."""
        held = self._copies.get(owner)
        if held is None or held[0] != rows:
            self._copy(owner, rows, sources)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._copies.move_to_end(owner)
        return self._copies[owner][1]

    def prefetch(self, owner: int, rows: int, sources: tuple[torch.Tensor, ...]) -> None:
        """Start copying what `fetch` will ask for next."""
        held = self._copies.get(owner)
        if held is None or held[0] != rows:
            self._copy(owner, rows, sources)

    def _copy(self, owner, rows, sources):
        self._copies.pop(owner, None)
        while len(self._copies) >= self.limit:
            self._copies.popitem(last=False)
        if self._stream is None:
            copies = tuple(t.clone() for t in sources)
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                copies = tuple(t.to(self.device, non_blocking=True) for t in sources)
            for copy in copies:
                copy.record_stream(torch.cuda.current_stream())
        self._copies[owner] = (rows, copies)

    def drop(self, owner: int) -> None:
        """Forget an owner's copies, which its release has made stale."""
        self._copies.pop(owner, None)

    def staged(self) -> dict[int, int]:
        """Bytes staged now, by owner."""
        return {
            owner: sum(t.numel() * t.element_size() for t in copies) for owner, (_, copies) in self._copies.items()
        }
