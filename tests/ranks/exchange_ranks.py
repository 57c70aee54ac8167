"""One rank of `test_exchanges.py`: every collective that there is, and what the dispatcher says of the same ones.

    exchange_ranks.py 2 RENDEZVOUS
"""

import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed._tools.fake_collectives import CollectiveOp
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from longstraw.exchanges import Exchange, ExchangeCounts, watch_exchanges
from tests.support.ranks import fork_ranks



class Dispatched(TorchDispatchMode):
    """Counts c10d's operations by group size."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and "barrier" not in func._schema.name:
            self.calls[CollectiveOp.get_process_group(func, args).size()] += 1
        return func(*args, **(kwargs or {}))


def exchange(group) -> dict[str, int]:
    """Every collective once in a group of 2 -> operation -> bytes of the larger buffer."""
    own, both = torch.ones(4), torch.ones(8)
    dist.all_reduce(own, group=group)
    dist.all_gather_into_tensor(both, own, group=group)
    dist.all_gather([torch.empty(4), torch.empty(4)], own, group=group)
    dist.reduce_scatter_tensor(own, both, group=group)
    dist.all_to_all_single(torch.empty(8), both, group=group)
    dist.broadcast(own.to(torch.float64), group_src=0, group=group)
    dist.reduce(own, group_dst=0, group=group)
    first = dist.get_rank(group) == 0
    dist.gather(own, [torch.empty(4), torch.empty(4)] if first else None, group_dst=0, group=group)
    dist.scatter(own, [both[:4], both[4:]] if first else None, group_src=0, group=group)
    (dist.send if first else dist.recv)(own, group=group, **({"group_dst": 1} if first else {"group_src": 0}))
    ends = 32 if first else 16
    return {"all_reduce": 16, "all_gather": 64, "reduce_scatter": 32, "all_to_all": 32, "broadcast": 32, "reduce": 16,
            "gather": ends, "scatter": ends, "send" if first else "recv": 16}


def main(rank: int, ranks: int, arguments: list[str]) -> None:
    """What is counted, what is not, and that nothing stays wrapped."""
    original = dist.ProcessGroup.allreduce
    counts = ExchangeCounts(lambda group: f"{group.size()} ranks")
    alone = dist.new_group([rank], use_local_synchronization=True)
    with Dispatched() as dispatched, watch_exchanges(counts.add):
        expected = exchange(dist.group.WORLD)
        dist.all_reduce(torch.ones(2, dtype=torch.int64), group=alone)
    calls = {operation: 2 if operation == "all_gather" else 1 for operation in expected}
    assert counts.totals == {
        **{("2 ranks", operation): Exchange(calls[operation], size) for operation, size in expected.items()},
        ("1 ranks", "all_reduce"): Exchange(1, 16),
    }, counts.totals
    assert dispatched.calls == {2: sum(calls.values()), 1: 1}, dispatched.calls

    again = ExchangeCounts(lambda group: "world")
    with watch_exchanges(again.add):
        dist.barrier()
        dist.all_gather_object([None, None], {"text": "x" * 1000})
        dist.broadcast_object_list([rank], src=0)
        assert again.totals == {}, again.totals
        weight = torch.ones(3, requires_grad=True)  # a hook runs in the backward
        weight.register_hook(lambda grad: dist.all_reduce(grad.clone()))
        weight.sum().backward()
    assert again.totals == {("world", "all_reduce"): Exchange(1, 12)}, again.totals
    dist.all_reduce(torch.ones(1))
    assert again.totals == {("world", "all_reduce"): Exchange(1, 12)} and dist.ProcessGroup.allreduce is original


if __name__ == "__main__":
    fork_ranks(main)
