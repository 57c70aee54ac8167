"""Writes that ranks make together: one that fails on one rank fails on all, before the next collective.

    sizes = write_agreed(lambda: write_own_files(folder))        collective; the work itself is this rank's alone

Left out: taking back what was written. Whoever reads looks for a file that is written last.
"""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from safetensors import SafetensorError

from longstraw.transaction.commit import agree_on_failure

Value = TypeVar("Value")


class WriteFailure(RuntimeError):
    """Some rank could not write: raised on every rank, with that rank's reason."""


def write_agreed(work: Callable[[], Value]) -> Value:
    """What this rank's work gives, once every rank's is done. Collective over the world; the work must not be.

    Raises WriteFailure, on every rank, where the work of one ends with OSError, SafetensorError or ValueError.
    """
    value, failure = try_write(work)
    failure = agree_on_failure(failure, dist.group.WORLD)
    if failure:
        raise WriteFailure(failure)
    return value


def write_on_rank_0(work: Callable[[], Value]) -> Value:
    """`write_agreed` of work that rank 0 does -> what it gave, on every rank."""
    value = [write_agreed(lambda: work() if dist.get_rank() == 0 else None)]
    dist.broadcast_object_list(value, src=0)
    return value[0]


def try_write(work: Callable[[], Value]) -> tuple[Value | None, str]:
    """(what the work gives, "") or (None, why it failed), for ranks that agree on it later."""
    try:
        return work(), ""
    except (OSError, SafetensorError, ValueError) as error:
        return None, str(error) or type(error).__name__
