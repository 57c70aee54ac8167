"""SIGTERM, as Slurm sends it before the time limit: remembered, and acted on where all ranks can agree.

A signal reaches ranks at different moments, so no rank may act on its own: `agreed` is collective.
"""

import signal

import torch
import torch.distributed as dist


class StopSignal:
    """Remembers SIGTERM (and SIGUSR1, which Slurm can send earlier) from the moment it is made."""

    def __init__(self, device: torch.device, signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGUSR1)):
        self._device, self._received = device, False
        self._previous = {number: signal.signal(number, self._receive) for number in signals}

    def _receive(self, number, frame) -> None:
        self._received = True

    def agreed(self, group: dist.ProcessGroup) -> bool:
        """Whether any rank of the group has been signalled. Collective; every rank gets one answer."""
        flag = torch.tensor(int(self._received), device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        return bool(flag)

    def restore(self) -> None:
        """Give the signals back to their former handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
