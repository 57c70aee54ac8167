"""Build a run's rollout source from its flags: who samples, who scores, and which store is read or written.

Left out: running without a model (`megatron.grpo.rollout_only`).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from longstraw.rollout.protocol import RolloutEngine
from longstraw.rollout.routes import RouteShape
from longstraw.rollout.store import RolloutStore
from longstraw.transaction.commit import agree_on_failure
from longstraw.transaction.step import Step
from megatron.grpo.reward_scoring import RewardScorer
from megatron.grpo.rollouts import RolloutSource, SampledRollouts
from megatron.grpo.run_config import TrainConfig
from megatron.grpo.run_data import RunData
from megatron.grpo.samplers import EngineSampler, ResidentSampler
from megatron.grpo.stored_rollouts import ReusedRollouts, StoredRollouts, StoreWriter, describe_sampling
from megatron.grpo.weight_lineage import WeightLineage


_SHORTEST_WAIT, _MARGIN = 30.0, 30.0
"""Seconds: the least that an engine gets for an answer, and how long before the ranks' own deadline it has to come."""


@dataclass(eq=False)
class RolloutParts:
    """What a trainer asks for groups: their source, the scorer of rewards, and the sampler of evaluations."""

    source: RolloutSource
    scorer: RewardScorer
    resident: ResidentSampler

    def close(self) -> None:
        """End the reward processes."""
        self.scorer.close()


def build_rollouts(
    args, config: TrainConfig, data: RunData, groups, step: Step, device: torch.device, *, done: int,
    lineage: WeightLineage | None = None,
) -> RolloutParts:
    """The rollouts of a run that has done `done` steps. Collective. lineage: of its weights.

    Raises ValueError, on every rank, where an engine cannot be reached, a store's next step cannot be trained on, or a
    store that is to be written holds another run.
    """
    flags, replica, world = config.rollouts, groups.tp_cp, dist.group.WORLD
    scorer = RewardScorer(data.tokenizer, config.rewards, stop_ids=data.stop_ids, replica=replica)
    common = dict(
        group_size=config.objective.group_size, stop_ids=data.stop_ids, num_tokens=len(data.tokenizer), seed=args.seed,
        device=device,
    )
    keeps_states = step.reference is None
    resident = ResidentSampler(
        step, config.sampling, keeps_states=keeps_states, record_routes=flags.rollout_router_replay, **common
    )
    settings = describe_sampling(args, config, data)

    def trained() -> str | None:
        return None if lineage is None else lineage.value

    folder = flags.rollouts_from or flags.rollout_store
    store = RolloutStore(folder) if folder else None
    stored = None if store is None else StoredRollouts(
        store, scorer, order=data.order, settings=settings, stop_ids=data.stop_ids, num_tokens=len(data.tokenizer),
        replica=replica, dp=groups.dp, device=device, routes=describe_routes(step) if flags.rollout_router_replay else None,
        lineage=trained,
    )
    if flags.rollouts_from:
        if done < args.train_iters:
            _on_rank_0(lambda: stored.check(done + 1))
        return RolloutParts(stored, scorer, resident)
    sampler, sampled_by = resident, trained
    if flags.rollout_engine == "vllm":
        # the other ranks wait in a collective meanwhile: the engine is to be the one that is late, with a sentence
        seconds = max(_SHORTEST_WAIT, 60.0 * args.distributed_timeout_minutes - _MARGIN)
        engine = connect_engine(flags.rollout_server, replica, seconds=seconds)
        follow = follow_weights(engine, config) if dist.get_rank() == 0 else None
        sampler = EngineSampler(
            "vllm", engine, config.sampling, replica=replica, follow=follow, wanted=lambda version: trained(), **common
        )
        sampled_by = (lambda: engine.lineage)  # asked where the engine is
    writer = None
    if store is not None:
        _on_rank_0(lambda: _open_store(store, done, resamples=sampler is resident))
        writer = StoreWriter(store, source=sampler.name, settings=settings, replica=replica, dp=groups.dp, lineage=sampled_by)
    source: RolloutSource = SampledRollouts(
        sampler, scorer, prompts=data.train_prompts, order=data.order, objective=config.objective,
        prompts_per_step=config.data.prompts_per_step, dp=groups.dp, world=world, device=device, store=writer,
    )
    if store is not None and sampler is not resident:
        source = ReusedRollouts(stored, source)
    return RolloutParts(source, scorer, resident)


def describe_routes(step: Step) -> RouteShape:
    """What the routes of a model with experts look like."""
    routers = step.engine.routers
    layers, one = tuple(adapter.layer_number for adapter in routers), routers[0].module
    return RouteShape(layers=layers, num_experts=one.num_experts, topk=one.topk)


def connect_engine(ready_file: str, replica: dist.ProcessGroup, *, seconds: float) -> RolloutEngine | None:
    """The client of the server behind --rollout-server, on the first rank of each replica. Collective over the world.

    seconds: that the server may take for an answer, or for a sync of weights. Raises ValueError, on every rank, where one cannot reach it.
    """
    engine, failure = None, ""
    if replica.rank() == 0:
        from longstraw.rollout.vllm_client import VllmEngine

        try:
            engine = VllmEngine(ready_file, generate_seconds=seconds, sync_seconds=seconds)
        except (OSError, RuntimeError, ValueError) as error:
            failure = f"--rollout-server {ready_file} cannot be reached: {error}"
    failure = agree_on_failure(failure, dist.group.WORLD)
    if failure:
        raise ValueError(failure)
    return engine


def follow_weights(engine: RolloutEngine, config: TrainConfig) -> Callable[[int], object] | None:
    """What brings the engine to a version that --weight-sync-dir holds; None without one: somebody else does."""
    folder = config.weight_sync.weight_sync_dir
    return None if folder is None else functools.partial(engine.follow, folder)


def _open_store(store: RolloutStore, done: int, *, resamples: bool) -> None:
    """Raise ValueError where a run that starts afresh would mix its steps with another's. A run that samples by itself
    makes the steps after `done` anew: those of its former life go."""
    steps = store.list_steps()
    if done == 0 and steps and (resamples or steps != [1]):
        raise ValueError(f"--rollout-store {store.folder} holds the rollouts of another run: give an empty folder")
    if resamples:
        store.drop_after(done)


def _on_rank_0(function) -> None:
    """Run a check on rank 0; its ValueError or OSError becomes every rank's ValueError. Collective."""
    failure = ""
    if dist.get_rank() == 0:
        try:
            function()
        except (ValueError, OSError) as error:
            failure = str(error)
    failure = agree_on_failure(failure, dist.group.WORLD)
    if failure:
        raise ValueError(failure)
