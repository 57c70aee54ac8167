"""The program: GRPO with the exact gradient, launched by torchrun.

    torchrun --nproc-per-node 2 -m megatron.grpo.train --model-preset tiny-qwen3.6 --context-parallel-size 2 ...

Builds everything from the command line, trains, and leaves metrics, TensorBoard events, a plot and a receipt in
--output-dir and checkpoints in --save. Exit codes: 0 when done or stopped by a signal and saved; 2 for flags that cannot
be run; 1 for anything else, after one sentence.
"""

import os
import sys

import torch
import torch.distributed as dist
from megatron.training import get_wandb_writer

from longstraw.exchanges import watch_exchanges
from longstraw.objectives.advantages import RewardBaseline, UniformGroupsError
from longstraw.patches.device import current_device
from longstraw.prompt_state.capacity import explain_shortage
from longstraw.receipts.host import read_free_host_bytes
from longstraw.receipts.recorder import RunRecorder
from longstraw.sweeps import ReplayEngine
from longstraw.transaction.commit import StepRejected, agree_on_failure
from longstraw.transaction.reference import ReferencePolicy
from longstraw.transaction.step import Step
from megatron.grpo.agreed_writes import WriteFailure
from megatron.grpo.arguments import parse_command_line
from megatron.grpo.checkpointing import (
    find_reference, load_checkpoint, load_weights, refuse_foreign_checkpoints, save_checkpoint,
)
from megatron.grpo.initialize import initialize, shut_down, write_arguments
from megatron.grpo.model_setup import build_training_model, wrap_model
from megatron.grpo.logra import build_logra, choose_trained
from megatron.grpo.logra_update import LograUpdate
from megatron.grpo.optimizer import build_optimizer, build_scheduler
from megatron.grpo.quiet_logs import quiet_logs
from megatron.grpo.rewards import RewardFailure
from megatron.grpo.rollout_only import roll_out_only
from megatron.grpo.rollout_setup import build_rollouts
from megatron.grpo.run_data import load_run_data
from megatron.grpo.run_record import RunRecord
from megatron.grpo.stop_signal import StopSignal
from megatron.grpo.trainer import Trainer
from megatron.grpo.weight_lineage import STATE as LINEAGE, open_lineage
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


def run(args, config) -> None:
    """Build, train and leave the record. Collective."""
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
    lineage = open_lineage(args, config, model, groups, resumed)
    weight_sync = open_weight_sync(args, config.weight_sync, model, update, groups, resumed_step=done, lineage=lineage)
    if config.weight_sync.weight_sync_only:
        weight_sync.start()
        stop.restore()
        return
    parts = build_rollouts(args, config, data, groups, step, device, done=done, lineage=lineage)
    step.check_stop = lambda: _stop_if(stop.agreed(groups.tp_cp))
    recorder = RunRecorder(
        args.output_dir, last_step=args.train_iters, rank=dist.get_rank(), resumed_step=done,
        tensorboard_folder=args.tensorboard_dir, tensorboard_queue=args.tensorboard_queue_size, wandb=get_wandb_writer(),
        **({"synchronize": torch.cuda.synchronize, "held_bytes": torch.cuda.memory_allocated} if device.type == "cuda" else {}),
    )
    engine.phase = recorder.clock.phase
    write_arguments(args)
    record = RunRecord(args, config, model, groups, recorder, done=done)

    def save(number: int):
        with recorder.clock.phase("save"):
            return save_checkpoint(
                args, number, model, optimizer, scheduler, groups, data_position=data.order.state_dict(),
                extra={"reward_baseline": baseline.state_dict()} | ({} if lineage is None else {LINEAGE: lineage.state_dict()}),
            )

    try:
        with recorder, watch_exchanges(record.exchanges.add):
            trainer = Trainer(
                args=args, config=config, groups=groups, update=update, step=step, rollouts=parts.source,
                scorer=parts.scorer, sampler=parts.resident,
                eval_prompts=list(data.eval_prompts[: config.run.eval_samples]), order=data.order, recorder=recorder,
                stop=stop, save=save, describe_step=record.add_step, baseline=baseline, weight_sync=weight_sync,
                lineage=lineage,
            )
            if weight_sync is not None:
                weight_sync.start()
            last_step = trainer.train(done + 1)
            if last_step > done:
                record.finish(trainer, last_step)
    finally:
        parts.close()
        stop.restore()


def _stop_if(asked: bool) -> None:
    from longstraw.transaction.step import StepInterrupted

    if asked:
        raise StepInterrupted


def main() -> int:
    """The command line program; returns the exit code."""
    if "--dry-run" in sys.argv:
        from megatron.grpo.dry_run.program import main as dry_run

        return dry_run([word for word in sys.argv[1:] if word != "--dry-run"])
    args, config = parse_command_line()
    quiet_logs()
    try:
        if config.rollouts.rollout_only:
            roll_out_only(args, config)
            return 0
        run(args, config)
    except (ValueError, StepRejected, RewardFailure, UniformGroupsError, WriteFailure) as error:
        print(f"train: rank {os.environ.get('RANK', 0)}: {error}", file=sys.stderr, flush=True)
        # Other ranks may wait in a collective: torchrun ends them once this one is gone.
        os._exit(1)
    shut_down()
    return 0


if __name__ == "__main__":
    sys.exit(main())
