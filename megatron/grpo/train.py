"""The program: GRPO with the exact gradient, launched by torchrun.

    torchrun --nproc-per-node 2 -m megatron.grpo.train --model-preset tiny-qwen3.6 --context-parallel-size 2 ...

Builds everything from the command line, trains, and leaves metrics, TensorBoard events, a plot and a receipt in
--output-dir and checkpoints in --save. Exit codes: 0 when done or stopped by a signal and saved; 2 for flags that cannot
be run; 1 for anything else, after one sentence.
"""

import os
import sys
from dataclasses import asdict

import torch
import torch.distributed as dist
from megatron.training import get_wandb_writer

from longstraw.memory_meter import read_peak_bytes
from longstraw.objectives.advantages import RewardBaseline, UniformGroupsError
from longstraw.patches.device import current_device
from longstraw.prompt_state.capacity import explain_shortage
from longstraw.receipts.collect import checksum_tensors, collect_versions, join_checksums, now_utc, summarize_state
from longstraw.receipts.host import read_free_host_bytes
from longstraw.receipts.receipt import Model, RankMemory, Receipt, Results, Tokens, Topology
from longstraw.receipts.metrics import read_metrics
from longstraw.receipts.recorder import RunRecorder
from longstraw.sweeps import ReplayEngine
from longstraw.transaction.commit import StepRejected, agree_on_failure
from longstraw.transaction.reference import ReferencePolicy
from longstraw.transaction.step import Step
from megatron.grpo.arguments import parse_command_line
from megatron.grpo.checkpointing import (
    find_reference, load_checkpoint, load_weights, refuse_foreign_checkpoints, save_checkpoint,
)
from megatron.grpo.initialize import initialize, shut_down
from megatron.grpo.model_setup import build_training_model, wrap_model
from megatron.grpo.logra import build_logra, choose_trained
from megatron.grpo.logra_update import LograUpdate
from megatron.grpo.optimizer import build_optimizer, build_scheduler
from megatron.grpo.quiet_logs import quiet_logs
from megatron.grpo.rewards import RewardFailure
from megatron.grpo.rollout_only import roll_out_only
from megatron.grpo.rollout_record import describe_rollouts
from megatron.grpo.rollout_setup import build_rollouts
from megatron.grpo.run_data import load_run_data
from megatron.grpo.sharding import is_expert, partition_dim
from megatron.grpo.stop_signal import StopSignal
from megatron.grpo.trainer import Trainer
from megatron.grpo.weight_sync import open_weight_sync
from megatron.grpo.weight_update import AdamUpdate, WeightUpdate


def check_host_memory(engine: ReplayEngine, longest_prompt: int) -> None:
    """Refuse, on every rank alike, prompts whose state does not fit into a host's memory. Collective.

    Raises ValueError with the bytes needed and the flags that reduce them.
    """
    message = explain_shortage(
        engine.foresee_state(longest_prompt), tokens=longest_prompt, free=read_free_host_bytes(),
        ranks=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
    )
    message = agree_on_failure(message, dist.group.WORLD)
    if message:
        raise ValueError(message)


def build_reference(args, config, model, groups, resumed) -> ReferencePolicy | None:
    """The reference policy where the objective has a KL term; the model's own weights are left as they are."""
    if config.objective.kl_coefficient == 0.0:
        return None
    folder = find_reference(args, config.run.reference_checkpoint, resumed)
    if folder is None:
        return ReferencePolicy(model)
    policy = ReferencePolicy(model)
    load_weights(folder, model, groups, vocab_size=args.vocab_size)
    reference = ReferencePolicy(model)
    policy.swap()
    return reference


def build_update(
    args, config, ddp, optimizer, scheduler, groups, step: Step, *, resumed_step: int = 0
) -> WeightUpdate:
    """What moves the weights under --optimizer. resumed_step: 0 where the run starts afresh."""
    if args.optimizer == "logra":
        return LograUpdate(args, config.logra, ddp, optimizer, scheduler, groups, step, resumed_step=resumed_step)
    return AdamUpdate(args, ddp, optimizer, scheduler, groups, step.engine.adapters)


def checksum_weights(model) -> str:
    """One checksum over every rank's weights, equal on every rank."""
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, checksum_tensors((n, p.data) for n, p in model.named_parameters()))
    return join_checksums(gathered)


def write_record(args, config, trainer, recorder, model, groups, *, started, initial_weights, first_step, last_step):
    """Gather every rank's share and write the receipt, the plot and the closing table (rank 0)."""
    world = dist.get_world_size()
    shares: list = [None] * world
    counts = trainer.counts if trainer.scorer.replica.rank() == 0 else type(trainer.counts)()
    state = summarize_state(dist.get_rank(), trainer.step.fullest_state)
    own = (dict(vars(counts)), state, read_peak_bytes(), count_resident_bytes(trainer, state))
    dist.all_gather_object(shares, own)
    totals = {name: sum(share[0][name] for share in shares) for name in shares[0][0]}
    final_weights = checksum_weights(model)
    if dist.get_rank() != 0:
        return
    records = read_metrics(recorder.metrics.path)
    evaluations = [r["eval_reward_mean"] for r in records if r.get("eval_reward_mean") is not None]
    before = records[0].get("eval_reward_mean_before") if records else None
    evaluations = evaluations if before is None else [before, *evaluations]
    receipt = Receipt(
        command=tuple(["megatron.grpo.train", *sys.argv[1:]]), seed=args.seed, started=started, finished=now_utc(),
        semantics=config.sweeps.semantics, versions=collect_versions(),
        topology=Topology(
            world_size=world, tensor_model_parallel_size=groups.tp.size(), context_parallel_size=groups.cp.size(),
            data_parallel_size=groups.dp.size(), expert_model_parallel_size=groups.ep.size(),
            sequence_parallel=args.sequence_parallel, backend=dist.get_backend(),
            device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        ),
        model=Model(
            preset=args.model_preset, parameters=count_parameters(model, groups),
            dtype=str(next(model.parameters()).dtype).removeprefix("torch."), initial_weights=initial_weights,
            final_weights=final_weights,
        ),
        objective=asdict(config.objective),
        update={"optimizer": args.optimizer} | (asdict(config.logra) if args.optimizer == "logra" else {}),
        rollout=describe_rollouts(config, trainer.rollouts, records, first_step),
        tokens=Tokens(**totals),
        state=tuple(item for share in shares for item in share[1]),
        memory=tuple(RankMemory(rank=rank, peak_bytes=share[2], categories=share[3]) for rank, share in enumerate(shares)),
        seconds=dict(recorder.clock.seconds),
        results=Results(
            first_step=first_step, last_step=last_step,
            first_eval_reward_mean=evaluations[0] if evaluations else None,
            last_eval_reward_mean=evaluations[-1] if evaluations else None,
        ),
    )
    title = f"{args.model_preset}, {config.sweeps.semantics}, CP {groups.cp.size()}, G {config.objective.group_size}"
    recorder.finish(receipt, title=title)


def count_resident_bytes(trainer, state) -> dict[str, int]:
    """Bytes of this rank by category: what is always there, and the ledger's state at its fullest."""
    weights = sum(p.numel() * p.element_size() for p in trainer.step.engine.model.parameters())
    categories = {"weights": weights} | trainer.update.count_bytes()
    for item in (item for item in state if item.residency == "device"):  # the peak is the device's
        categories[item.kind] = categories.get(item.kind, 0) + item.bytes
    return categories


def count_parameters(model, groups) -> int:
    """Parameters of the whole model: shards of tensor parallelism and all ranks' experts added up, replicated ones once."""
    tp, ep, total = groups.tp.size(), groups.ep.size(), 0
    for name, parameter in model.named_parameters():
        copies = ep if is_expert(name) else 1 if partition_dim(name) is None else tp
        total += parameter.numel() * copies
    return total


def run(args, config) -> None:
    """Build, train and leave the record. Collective."""
    started = now_utc()
    groups = initialize(args)
    device = current_device()
    data = load_run_data(args, config)
    model = build_training_model(args, groups)
    if args.optimizer == "logra":
        choose_trained(args, config.logra, model)
    ddp = wrap_model(args, model, groups)
    optimizer = build_logra(args, config.logra, ddp, groups) if args.optimizer == "logra" else build_optimizer(args, ddp, groups)
    scheduler = build_scheduler(args, optimizer)
    refuse_foreign_checkpoints(args)
    resumed = load_checkpoint(args, model, optimizer, scheduler, groups)
    baseline = RewardBaseline()
    if resumed is not None and resumed.data_position is not None:
        data.order.load_state_dict(resumed.data_position)
        baseline.load_state_dict(resumed.extra.get("reward_baseline", baseline.state_dict()))
    done = 0 if resumed is None else resumed.iteration
    stop = StopSignal(device)
    engine = ReplayEngine(
        model, config.sweeps, vocab_size=args.vocab_size, temperature=config.sampling.sampling_temperature
    )
    check_host_memory(engine, data.longest_prompt)
    step = Step(
        engine, config.objective, dp=groups.dp, responses_together=config.run.responses_per_replay,
        reference=build_reference(args, config, model, groups, resumed), mismatch=config.mismatch,
        replays_routes=config.rollouts.rollout_router_replay,
    )
    update = build_update(args, config, ddp, optimizer, scheduler, groups, step, resumed_step=done)
    weight_sync = open_weight_sync(args, config.weight_sync, model, update, groups, resumed_step=done)
    if config.weight_sync.weight_sync_only:
        weight_sync.start()
        stop.restore()
        return
    parts = build_rollouts(args, config, data, groups, step, device, done=done)
    step.check_stop = lambda: _stop_if(stop.agreed(groups.tp_cp))
    initial_weights = checksum_weights(model)
    recorder = RunRecorder(
        args.output_dir, last_step=args.train_iters, rank=dist.get_rank(), resumed_step=done,
        tensorboard_folder=args.tensorboard_dir, tensorboard_queue=args.tensorboard_queue_size, wandb=get_wandb_writer(),
    )

    def save(number: int):
        with recorder.clock.phase("save"):
            return save_checkpoint(
                args, number, model, optimizer, scheduler, groups, data_position=data.order.state_dict(),
                extra={"reward_baseline": baseline.state_dict()},
            )

    try:
        with recorder:
            trainer = Trainer(
                args=args, config=config, groups=groups, update=update, step=step, rollouts=parts.source,
                scorer=parts.scorer, sampler=parts.resident,
                eval_prompts=list(data.eval_prompts[: config.run.eval_samples]), order=data.order, recorder=recorder,
                stop=stop, save=save, baseline=baseline, weight_sync=weight_sync,
            )
            if weight_sync is not None:
                weight_sync.start()
            last_step = trainer.train(done + 1)
            if last_step > done:
                write_record(
                    args, config, trainer, recorder, model, groups, started=started, initial_weights=initial_weights,
                    first_step=done + 1, last_step=last_step,
                )
    finally:
        parts.close()
        stop.restore()


def _stop_if(asked: bool) -> None:
    from longstraw.transaction.step import StepInterrupted

    if asked:
        raise StepInterrupted


def main() -> int:
    """The command line program; returns the exit code."""
    args, config = parse_command_line()
    quiet_logs()
    try:
        if config.rollouts.rollout_only:
            roll_out_only(args, config)
            return 0
        run(args, config)
    except (ValueError, StepRejected, RewardFailure, UniformGroupsError) as error:
        print(f"train: rank {os.environ.get('RANK', 0)}: {error}", file=sys.stderr, flush=True)
        # Other ranks may wait in a collective: torchrun ends them once this one is gone.
        os._exit(1)
    shut_down()
    return 0


if __name__ == "__main__":
    sys.exit(main())
