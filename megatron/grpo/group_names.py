"""What receipts and reports call a process group: tp, cp, ep and so on.

Left out: which groups there are (`longstraw.patches.process_groups`).
"""

from collections.abc import Callable

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

NAMES = ("tp", "cp", "ep", "dp", "dp_cp", "tp_cp", "expt_dp", "expt_tp", "tp_ep", "mp")


def name_groups(groups: ProcessGroupCollection) -> Callable[[dist.ProcessGroup | None], str]:
    """A process group (None: the world) -> its name. Of groups over the same ranks the first of NAMES has the name; one that
    none is like is "world", or called by how many ranks it has."""
    names: dict[tuple[int, ...], str] = {}
    for name in NAMES:
        if (group := getattr(groups, name, None)) is not None:
            names.setdefault(tuple(dist.get_process_group_ranks(group)), name)

    def name_of(group: dist.ProcessGroup | None) -> str:
        ranks = list_ranks(group)
        return names.get(ranks, "world" if len(ranks) == dist.get_world_size() else f"{len(ranks)} ranks")

    return name_of


def list_ranks(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """The global ranks of a group (None: the world)."""
    return tuple(range(dist.get_world_size()) if group is None else dist.get_process_group_ranks(group))
