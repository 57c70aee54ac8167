"""Data-parallel replicas that share experts run their passes in step.

With more expert-parallel than context-parallel ranks, the experts of one group serve several replicas, and every pass
through a layer with experts is an exchange among all of these. But replicas have different prompts, so different numbers
of blocks. Before each pass they agree on its kind; a replica that wants another kind, or nothing more, serves its
experts meanwhile, in a pass of its own that adds nothing to any gradient.

Without such sharing nothing is exchanged here.
"""

from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, order=True)
class PassKind:
    """What decides which exchanges a pass makes: whether a backward follows, and whether it ends in the last layer."""

    replay: bool
    captures_only: bool

    @property
    def code(self) -> int:
        """A positive number; 0 stands for no pass."""
        return 1 + self.replay + 2 * self.captures_only


_KINDS = {kind.code: kind for kind in (PassKind(r, c) for r in (False, True) for c in (False, True))}


class Lockstep:
    """The replicas whose experts lie on the ranks of `ep`; alone where these all belong to one replica.

    ep, cp: the expert-parallel and the context-parallel group. device: of the exchanged numbers.
    """

    def __init__(self, ep: dist.ProcessGroup | None, cp: dist.ProcessGroup, device: torch.device):
        self.group = ep if ep is not None and ep.size() > cp.size() else None
        self.device = device

    def choose(self, wanted: PassKind | None) -> PassKind | None:
        """The kind of the next pass, the same on every rank: what most of them want. None where nobody wants any.

        Collective over the sharing replicas.
        """
        if self.group is None:
            return wanted
        own = torch.tensor([0 if wanted is None else wanted.code], device=self.device)
        gathered = own.new_empty(self.group.size())
        dist.all_gather_into_tensor(gathered, own, group=self.group)
        votes = Counter(code for code in gathered.tolist() if code)
        return _KINDS[max(votes, key=lambda code: (votes[code], code))] if votes else None
