"""A rank of a world that is not there: a process group whose exchanges go nowhere.

    with fake_world(ranks=8, rank=0), ShapesOnly() as tracker:
        model = ...

A process can be one rank of one such world at a time. Left out: what ranks would tell each other. Objects that are gathered
are this rank's, once for each rank.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # noqa: F401  (gives collectives their forms on fake tensors)
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_world(*, ranks: int, rank: int) -> Iterator[None]:
    """A block in which this process is one rank of a world of so many.

    Raises ValueError where it is in a world already.
    """
    if dist.is_initialized():
        raise ValueError("a dry run wants a process of its own: this one has joined a world of ranks already")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        with ExitStack() as stack:
            for name, function in (("all_gather_object", _gather_own), ("broadcast_object_list", _keep_own)):
                stack.enter_context(mock.patch.object(dist, name, function))
            yield
    finally:
        dist.destroy_process_group()


def _gather_own(object_list: list, obj, group=None) -> None:
    object_list[:] = [obj] * len(object_list)


def _keep_own(object_list: list, src=None, group=None, device=None, group_src=None) -> None:
    """Nothing: what this rank has is what it would receive."""
