"""A rollout engine that answers with the rollouts of a store: what a sampler once sampled, through the engine's interface.

It refuses as engines do: another weight version, prompts that it has not.
"""

from longstraw.rollout.protocol import WeightVersionError
from longstraw.rollout.store import RolloutStore


class RecordedEngine:
    """See `longstraw.rollout.protocol.RolloutEngine`.

    failure: raised by every call from the `fails_at`-th on (from 1). lineage: that it says its weights have, by default
    that of the store's step. calls: the prompts of each call so far.
    """

    def __init__(
        self, store: RolloutStore, weight_version: int | None, *, failure: Exception | None = None, fails_at: int = 1,
        lineage: str | None = None,
    ):
        self.store, self.version, self.failure, self.fails_at = store, weight_version, failure, fails_at
        self.told_lineage, self.last_version = lineage, None
        self.calls: list[list[str]] = []

    @property
    def weight_version(self) -> int | None:
        return self.version

    @property
    def lineage(self) -> str | None:
        return self.told_lineage or self._recorded_lineage()

    def _recorded_lineage(self) -> str | None:
        """Of the weights that sampled what the engine would answer with, or has answered with last."""
        version = self.version if self.last_version is None else self.last_version
        if version is None or version + 1 not in self.store.list_steps():
            return None
        return self.store.read_manifest(version + 1).lineage or None

    def generate(self, requests, *, group_size, sampling, seed, stop_ids, num_tokens=None):
        self.calls.append([request.prompt_id for request in requests])
        if self.failure is not None and len(self.calls) >= self.fails_at:
            raise self.failure
        step = requests[0].weight_version + 1
        if self.version is not None and self.version != step - 1:
            raise WeightVersionError(f"the engine holds weights of version {self.version}, not {step - 1}")
        self.last_version = step - 1
        recorded = {
            f"{group.prompt_id}@{group.place}": group for group in self.store.read(self.store.read_manifest(step))
        }
        groups = [recorded[request.prompt_id] for request in requests]
        assert all(tuple(g.prompt_token_ids) == tuple(r.token_ids) for g, r in zip(groups, requests))
        return [list(group.samples) for group in groups]
