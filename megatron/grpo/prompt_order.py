"""In which order prompts are trained on, and how to continue exactly there.

Each epoch visits every prompt once, in an order that depends on the seed and the epoch alone. The position counts
prompts of the whole job, not of a rank, so a run resumed with another data-parallel size goes on with the next
prompt. The order sorts by a hash rather than drawing from a random generator: the same on every machine and
version, and no random state to save.

Left out: sampling with replacement, weights between data sets, and curricula.
"""

from hashlib import blake2b
from typing import Any


def permute(num_prompts: int, *, seed: int, epoch: int) -> list[int]:
    """The order of one epoch: a permutation of range(num_prompts) fixed by (seed, epoch)."""
    return sorted(
        range(num_prompts), key=lambda index: blake2b(f"{seed}:{epoch}:{index}".encode(), digest_size=16).digest()
    )


class PromptOrder:
    """Hands out prompt indices step by step.

    Every data-parallel rank holds the same order and calls `take` with the same counts; each keeps its own share.
    `state_dict` is what a checkpoint stores.
    """

    def __init__(self, num_prompts: int, *, seed: int = 0, shuffle: bool = True, fingerprint: str = "") -> None:
        """
        Args:
            num_prompts: prompts in the data set.
            seed: seed of the order.
            shuffle: False visits the prompts in file order in each epoch.
            fingerprint: identifies the data (`PromptDataset.fingerprint`), so that a saved position is never
                applied to other prompts.

        Raises:
            ValueError: there are no prompts.
        """
        if num_prompts < 1:
            raise ValueError("there are no prompts to order")
        self._identity = {"num_prompts": num_prompts, "seed": seed, "shuffle": shuffle, "fingerprint": fingerprint}
        self.epoch = 0
        """Epoch that the next prompt belongs to, from 0."""
        self.position = 0
        """Prompts of this epoch that all ranks together have taken."""
        self._order = self._order_of(0)

    def take(self, count: int) -> list[int]:
        """The next `count` prompt indices of the whole job, going on into the next epochs where this one ends.

        Raises:
            ValueError: `count` is below 1.
        """
        num_prompts = self._identity["num_prompts"]
        if count < 1:
            raise ValueError(f"cannot take {count} prompts")
        taken: list[int] = []
        while len(taken) < count:
            if self.position == num_prompts:
                self._move_to(self.epoch + 1, 0)
            end = min(num_prompts, self.position + count - len(taken))
            taken.extend(self._order[self.position : end])
            self.position = end
        return taken

    def take_shard(self, count: int, *, dp_rank: int, dp_size: int) -> list[int]:
        """This data-parallel rank's share of the next `count` prompts: every dp_size-th, starting at dp_rank.

        All ranks advance by `count`. Shares differ by at most one prompt, and a share is empty where `count` is
        below `dp_size`.

        Raises:
            ValueError: as `take`, or dp_rank is not in range(dp_size).
        """
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"data-parallel rank {dp_rank} is not in a group of {dp_size}")
        return self.take(count)[dp_rank::dp_size]

    def state_dict(self) -> dict[str, Any]:
        """Where the order stands, as a plain dict of numbers, strings and booleans."""
        return {"epoch": self.epoch, "position": self.position, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            ValueError: the state is of another data set, seed or shuffle setting, or is malformed; this order is
                then left as it was.
        """
        wanted = {"epoch", "position", *self._identity}
        if set(state) != wanted:
            raise ValueError(f"the saved prompt order holds {sorted(state)}, not {sorted(wanted)}")
        different = [name for name, value in self._identity.items() if state[name] != value]
        if different:
            changes = ", ".join(f"{name} {state[name]!r} then and {self._identity[name]!r} now" for name in different)
            raise ValueError(
                f"the saved prompt order belongs to other prompts or another order ({changes}); resume with the "
                "--prompt-data, --prompt-length-limit, tokenizer and order flags of the saved run"
            )
        if state["epoch"] < 0 or not 0 <= state["position"] <= self._identity["num_prompts"]:
            raise ValueError(f"the saved prompt order stands at epoch {state['epoch']}, position {state['position']}")
        self._move_to(state["epoch"], state["position"])

    def _move_to(self, epoch: int, position: int) -> None:
        self._order = self._order_of(epoch)
        self.epoch, self.position = epoch, position

    def _order_of(self, epoch: int) -> list[int]:
        num_prompts = self._identity["num_prompts"]
        if not self._identity["shuffle"]:
            return list(range(num_prompts))
        return permute(num_prompts, seed=self._identity["seed"], epoch=epoch)
