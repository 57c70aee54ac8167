"""Sample and score steps into a store without a model (--rollout-only): one process beside a rollout engine.

    python -m megatron.grpo.train FLAGS OF THE TRAINING RUN --rollout-only --rollout-steps 1 \\
        --rollout-engine vllm --rollout-server ready.json --rollout-store rollouts

The engine's weight version says which step is next: version 4 answers for step 5. Where its prompts begin is what the
store's step 4 left, or else the checkpoint of step 4 in --load. A step that is in the store already is checked and left as
it is, so the command can be run again after a crash.

Left out: exporting weights and starting the engine.
"""

import time

import torch
import torch.distributed as dist

from longstraw.patches.gloo_device import share_gloo_device
from longstraw.rollout.protocol import RolloutEngine
from longstraw.rollout.store import RolloutStore
from longstraw.rollout.weight_folder import read_manifest, version_folder
from longstraw.transaction.group import PromptGroup
from megatron.grpo.checkpointing import read_data_position
from megatron.grpo.initialize import claim_folders, release_folders
from megatron.grpo.reward_scoring import RewardScorer
from megatron.grpo.rollout_setup import connect_engine, follow_weights
from megatron.grpo.rollouts import SampledRollouts
from megatron.grpo.run_config import TrainConfig
from megatron.grpo.run_data import RunData, load_run_data
from megatron.grpo.samplers import EngineSampler
from megatron.grpo.stored_rollouts import StoreWriter, check_step, describe_sampling


_LONGEST_ANSWER = 24 * 3600.0
"""Seconds: nobody else waits here, and whoever started this process knows how long a step may take."""


def roll_out_only(args, config: TrainConfig, engine: RolloutEngine | None = None) -> None:
    """Sample the next steps, --rollout-steps at most and none beyond --train-iters.

    engine: by default a client of --rollout-server.

    Raises ValueError, StepRejected, RewardFailure or UniformGroupsError, with a sentence, where a step cannot be had; the
    steps before it are in the store.
    """
    share_gloo_device()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    claim_folders([config.rollouts.rollout_store])
    data = load_run_data(args, config)
    engine = engine or connect_engine(config.rollouts.rollout_server, dist.group.WORLD, seconds=_LONGEST_ANSWER)
    scorer = RewardScorer(data.tokenizer, config.rewards, stop_ids=data.stop_ids, replica=dist.group.WORLD)
    try:
        _roll_out(args, config, data, engine, scorer)
    finally:
        scorer.close()
        dist.destroy_process_group()
        release_folders()


def _roll_out(args, config: TrainConfig, data: RunData, engine: RolloutEngine, scorer: RewardScorer) -> None:
    store, settings = RolloutStore(config.rollouts.rollout_store), describe_sampling(args, config, data)
    alone, device = dist.group.WORLD, torch.device("cpu")

    def wanted(version: int) -> str | None:
        return read_lineage(config.weight_sync.weight_sync_dir, version)

    sampler = EngineSampler(
        config.rollouts.rollout_engine, engine, config.sampling, group_size=config.objective.group_size,
        stop_ids=data.stop_ids, num_tokens=len(data.tokenizer), seed=args.seed, replica=alone, device=device,
        follow=follow_weights(engine, config), wanted=wanted,
    )
    source = SampledRollouts(
        sampler, scorer, prompts=data.train_prompts, order=data.order, objective=config.objective,
        prompts_per_step=config.data.prompts_per_step, dp=alone, world=alone, device=device,
        store=StoreWriter(
            store, source=sampler.name, settings=settings, replica=alone, dp=alone, lineage=lambda: engine.lineage
        ),
    )
    first = _next_step(engine, config.rollouts.rollout_server)
    last = min(first + config.rollouts.rollout_steps - 1, args.train_iters)
    if first > last:
        print(f"nothing is left to do: the engine holds the weights of step {first - 1}, and --train-iters is {last}")
        return
    place_order(args, data, store, first)
    for number in range(first, last + 1):
        if number in store.list_steps():
            held = engine.lineage if engine.weight_version == number - 1 else None
            manifest = check_step(store, number, settings, data.order, wanted(number - 1) or held)
            store.verify(manifest)
            data.order.load_state_dict(dict(manifest.data_after))
            print(f"step {number} is in {store.folder} already: {manifest.rows} rollouts", flush=True)
            continue
        started = time.perf_counter()
        groups = source.collect(number)
        print(f"step {number}: {_describe(groups)} in {time.perf_counter() - started:.3g} s, in {store.folder}", flush=True)
        if scorer.first_failure:
            print(f"step {number}: rewards failed, the first: {scorer.first_failure}", flush=True)
            scorer.forget_failures()


def read_lineage(folder: str | None, version: int) -> str | None:
    """Of a version in --weight-sync-dir; None without that flag, or where the version is not there: an engine that has to
    be brought to it will say so."""
    try:
        return None if folder is None else read_manifest(version_folder(folder, version)).lineage
    except ValueError:
        return None


def _next_step(engine: RolloutEngine, server: str) -> int:
    """The step that the engine's weights are trained in. Raises ValueError where it holds none or cannot be asked."""
    try:
        version = engine.weight_version
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"the engine of --rollout-server {server} does not say which weights it holds: {error}") from error
    if version is None:
        raise ValueError(f"the engine of --rollout-server {server} holds no weights yet")
    return version + 1


def place_order(args, data: RunData, store: RolloutStore, number: int) -> None:
    """Let the order of the prompts stand where step `number` begins.

    Raises ValueError where nothing says where that is, or what says it is of other data.
    """
    if number == 1:
        return
    if number - 1 in store.list_steps():
        data.order.load_state_dict(dict(store.read_manifest(number - 1).data_after))
    elif args.load:
        data.order.load_state_dict(read_data_position(args.load, number - 1))
    else:
        raise ValueError(
            f"step {number} begins where step {number - 1} ended in the data, and neither --rollout-store {store.folder} has "
            f"that step nor --load a checkpoint of it"
        )


def _describe(groups: list[PromptGroup]) -> str:
    rewards = [reward for group in groups for reward, kept in zip(group.rewards, group.kept) if kept]
    mean = f"mean reward {sum(rewards) / len(rewards):.3f}" if rewards else "no reward"
    return f"{len(groups)} groups, {sum(len(group.samples) for group in groups)} rollouts, {mean}"
