"""Steps between the trainer and a rollout store: written by whoever samples, read instead of sampling.

`StoreWriter` gathers every replica's groups on the first rank of the job, which writes them. `StoredRollouts` is the source
that reads: the first rank of each replica takes its share of the groups, whatever the number of replicas that wrote them,
and broadcasts it. Either way the data's position is part of the step, so that a run can go on from one to the other.

A step is trained on only if it was sampled as this run would sample it, by the weights that it trains, from where this run
stands in the data; anything else is refused in a sentence.
"""

import json
from array import array
from collections.abc import Callable, Mapping
from dataclasses import asdict
from hashlib import sha256

import torch
import torch.distributed as dist

from longstraw.rollout.checks import check_samples
from longstraw.rollout.manifest import StepManifest, explain_difference
from longstraw.rollout.routes import RouteShape
from longstraw.rollout.store import RolloutStore, StoredGroup
from longstraw.transaction.group import PromptGroup
from megatron.grpo.arguments import resolve_preset
from megatron.grpo.prompt_order import PromptOrder
from megatron.grpo.reward_scoring import RewardScorer
from megatron.grpo.rollouts import SampledRollouts
from megatron.grpo.run_config import TrainConfig
from megatron.grpo.run_data import RunData
from megatron.grpo.samplers import SamplingFailure
from megatron.grpo.weight_lineage import short


def describe_sampling(args, config: TrainConfig, data: RunData) -> dict:
    """What a step's rollouts depend on besides weights and data, by flag; a store's steps are held to it."""
    vocabulary = json.dumps([sorted(data.tokenizer.get_vocab().items()), sorted(data.stop_ids)]).encode()
    return asdict(config.sampling) | {
        "model_preset": resolve_preset(args).name,
        "group_size": config.objective.group_size, "group_filter": config.objective.group_filter,
        "prompts_per_step": config.data.prompts_per_step, "tokenizer_path": sha256(vocabulary).hexdigest()[:16],
    }


class StoreWriter:
    """Writes each step of a run.

    replica, dp: of this rank; the first rank of the first replica writes. settings: from `describe_sampling`. lineage: of
    the weights that have sampled, None where nobody knows; asked on the rank that writes.
    """

    def __init__(
        self, store: RolloutStore, *, source: str, settings: Mapping, replica: dist.ProcessGroup, dp: dist.ProcessGroup,
        lineage: Callable[[], str | None] = lambda: None,
    ):
        self.lineage = lineage
        self.store, self.source, self.settings, self.replica, self.dp = store, source, settings, replica, dp

    def write(
        self, number: int, groups: list[PromptGroup], left_out: list[PromptGroup], before: dict, after: dict
    ) -> str:
        """See `megatron.grpo.rollouts.StepWriter`. Collective over the first ranks of the replicas; of them, the first
        may return a sentence."""
        if self.replica.rank() != 0:
            return ""
        # of one order over all replicas, from which any number of them takes turns
        own = [pack(group, self.dp.rank() + self.dp.size() * place) for place, group in enumerate(groups)]
        own += [pack(group, None) for group in left_out]
        gathered: list = [None] * self.dp.size()
        dist.all_gather_object(gathered, own, group=self.dp)
        if self.dp.rank() != 0:
            return ""
        everything = [group for part in gathered for group in part]
        in_step = sorted((g for g in everything if g.group_index is not None), key=lambda g: g.group_index)
        rest = sorted((g for g in everything if g.group_index is None), key=lambda g: (g.attempt, g.place))
        manifest = StepManifest(
            step=number, weight_version=number - 1, source=self.source, settings=dict(self.settings), data_before=before,
            data_after=after, groups=len(in_step), rows=sum(len(group.samples) for group in everything),
            lineage=self.lineage() or "",
        )
        try:
            self.store.write(in_step + rest, manifest)
        except (OSError, ValueError) as error:
            return f"--rollout-store {self.store.folder} cannot take step {number}: {error}"
        return ""


class StoredRollouts:
    """Groups of an earlier run.

    scorer: counts the rewards that had failed. settings: of this run. routes: what those
    of its model look like, where they are to be replayed. lineage: of the weights that the run trains.
    """

    name = "store"
    sampled_by = ""

    def __init__(
        self, store: RolloutStore, scorer: RewardScorer, *, order: PromptOrder, settings: Mapping, stop_ids: frozenset[int],
        num_tokens: int, replica: dist.ProcessGroup, dp: dist.ProcessGroup, device: torch.device,
        routes: RouteShape | None = None, lineage: Callable[[], str | None] = lambda: None,
    ):
        self.store, self.scorer, self.order, self.settings = store, scorer, order, settings
        self.stop_ids, self.num_tokens, self.replica, self.dp, self.device = stop_ids, num_tokens, replica, dp, device
        self.routes, self.lineage = routes, lineage

    def collect(self, number: int) -> list[PromptGroup]:
        """See `megatron.grpo.rollouts.RolloutSource`."""
        read: list[tuple[StepManifest, list[StoredGroup]] | str] = [""]
        if self.replica.rank() == 0:
            try:
                manifest = self.check(number)
                read = [(manifest, self._read_share(manifest))]
            except ValueError as error:
                read = [f"--rollouts-from: {error}"]
        dist.broadcast_object_list(read, group_src=0, group=self.replica)
        if isinstance(read[0], str):
            raise SamplingFailure(read[0])
        manifest, stored = read[0]
        self.order.load_state_dict(dict(manifest.data_after))
        self.sampled_by = manifest.source
        for group in stored:
            self.scorer.note(zip(group.statuses, group.messages))
        return [unpack(group, self.device) for group in stored if group.group_index is not None]

    def check(self, number: int) -> StepManifest:
        """`check_step` of this run's next step."""
        return check_step(self.store, number, self.settings, self.order, self.lineage())

    def _read_share(self, manifest: StepManifest) -> list[StoredGroup]:
        groups = self.store.read(manifest, rank=self.dp.rank(), ranks=self.dp.size())
        for group in groups:
            problem = check_samples(
                group.samples, group_size=self.settings["group_size"], weight_version=manifest.weight_version,
                max_response_length=self.settings["max_response_length"], stop_ids=self.stop_ids,
                num_tokens=self.num_tokens, routes=self.routes,
            )
            if problem:
                raise ValueError(f"step {manifest.step} of {self.store.folder}, prompt {group.prompt_id}: {problem}")
        return groups


class ReusedRollouts:
    """Sampled groups, but those of a step that the store has already: a run that goes on after a crash does not sample what
    was on disk. For engines whose samples are worth more than the certainty that the same weights are sampled anew."""

    def __init__(self, stored: StoredRollouts, sampled: SampledRollouts):
        self.stored, self.sampled, self.name, self.sampled_by = stored, sampled, sampled.name, sampled.name

    def collect(self, number: int) -> list[PromptGroup]:
        """See `megatron.grpo.rollouts.RolloutSource`."""
        there = [number in self.stored.store.list_steps() if dist.get_rank() == 0 else False]
        dist.broadcast_object_list(there, src=0)
        return (self.stored if there[0] else self.sampled).collect(number)


def check_step(
    store: RolloutStore, number: int, settings: Mapping, order: PromptOrder, lineage: str | None = None
) -> StepManifest:
    """The manifest of a step that a run with these settings can train on where its order stands.

    lineage: of the run's weights. Where either side does not know it, the version's number is all that is held.
    Raises ValueError, in one sentence, for any other.
    """
    manifest = store.read_manifest(number)
    where = f"step {number} of {store.folder} was"
    if manifest.weight_version != number - 1:
        raise ValueError(
            f"{where} sampled by weights of version {manifest.weight_version}, and step {number} trains those of version "
            f"{number - 1}"
        )
    if lineage and manifest.lineage and lineage != manifest.lineage:
        raise ValueError(
            f"{where} sampled by other weights of version {manifest.weight_version} than this run's: the runs started from "
            f"other weights, or have trained with other flags or on other rollouts (lineage {short(manifest.lineage)} then and "
            f"{short(lineage)} now)"
        )
    difference = explain_difference(manifest, settings)
    if difference:
        raise ValueError(f"{where} {difference}")
    here, then = order.state_dict(), manifest.data_before
    if dict(then) != here:
        names = [name for name in sorted({*here, *then}) if here.get(name) != then.get(name)]
        shown = ", ".join(f"{name} {then.get(name)!r} then and {here.get(name)!r} now" for name in names)
        raise ValueError(f"{where} sampled from another place of the data, or other data ({shown})")
    return manifest


def pack(group: PromptGroup, index: int | None) -> StoredGroup:
    """A scored group as the store keeps it."""
    attempt, place = group.draw
    return StoredGroup(
        prompt_id=group.prompt_id, prompt_token_ids=array("i", group.prompt[0].tolist()), samples=tuple(group.samples),
        rewards=tuple(group.rewards), statuses=tuple(group.statuses), messages=tuple(group.messages),
        kept=tuple(group.kept), group_index=index, attempt=attempt, place=place,
    )


def unpack(group: StoredGroup, device: torch.device) -> PromptGroup:
    """A stored group as the trainer replays it."""
    prompt = torch.tensor([group.prompt_token_ids], dtype=torch.int64, device=device)
    return PromptGroup(
        group.prompt_id, prompt, list(group.samples), rewards=list(group.rewards), statuses=list(group.statuses),
        messages=list(group.messages), scored=[status == "ok" for status in group.statuses], kept=list(group.kept),
        draw=(group.attempt, group.place),
    )
