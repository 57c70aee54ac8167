"""One rank of `test_rollout_engine.py`: runs whose groups come from an engine, of which one rank a replica is the client.

    rollout_engine_ranks.py 2 RENDEZVOUS FOLDER

The engine answers with what a resident run has left in a store, so the run must be the resident one to the bit.
"""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from rollout_store_ranks import failure_of
from training_ranks import Runner, without_measured

from longstraw.rollout.store import RolloutStore
from longstraw.transaction.commit import StepRejected
from megatron.grpo.rewards import RewardFailure
from megatron.grpo.samplers import EngineSampler
from megatron.grpo.stored_rollouts import ReusedRollouts, StoredRollouts, StoreWriter
from tests.support.ranks import fork_ranks
from tests.support.recorded_engine import RecordedEngine

REPLICAS = "--context-parallel-size 1 --prompts-per-step 3"
ROUTED = "--model-preset tiny-qwen3-moe --num-layers 2 --expert-model-parallel-size 2 --train-iters 2 " \
         "--rollout-router-replay"


def put_engine(trainer, engine: RecordedEngine, *, follow=None) -> None:
    """Have the trainer's groups come from an engine, its client on the first rank of each replica."""
    source, resident, replica = trainer.rollouts, trainer.sampler, trainer.scorer.replica
    source.sampler = EngineSampler(
        "vllm", engine if replica.rank() == 0 else None, resident.sampling, group_size=resident.group_size,
        stop_ids=resident.stop_ids, num_tokens=resident.num_tokens, seed=resident.seed, replica=replica,
        device=resident.device, follow=follow,
    )
    source.name = source.sampled_by = "vllm"


def check_same_run(runner: Runner, name: str, flags: str) -> None:
    """Groups through an engine train to the bits of the resident run that sampled them, and leave the same store."""
    folder, again, engines = runner.folder / f"{name}-store", runner.folder / f"{name}-again", []

    def prepare(trainer):
        engines.append(RecordedEngine(RolloutStore(folder), None))
        put_engine(trainer, engines[0])

    saved = f"--save {runner.folder}/{name}-ckpt --save-interval 2"
    made = runner.run(f"{name}-made", f"{flags} --rollout-store {folder} {saved}")
    found = runner.run(f"{name}-engine", f"{flags} --rollout-store {again}", prepare=prepare)
    assert without_measured(made) == without_measured(found), (made, found)
    receipts = [runner.receipt(f"{name}-{kind}") for kind in ("made", "engine")]
    assert receipts[0]["model"]["final_weights"] == receipts[1]["model"]["final_weights"]
    assert [receipt["rollout"]["source"] for receipt in receipts] == ["resident", "vllm"]
    assert abs(receipts[1]["rollout"]["log_ratio_mean"]) < 1e-5 and receipts[1]["rollout"]["store"] == str(again)
    for step in (1, 2, 3):
        one, other = (RolloutStore(path).read_manifest(step) for path in (folder, again))
        assert one.checksum == other.checksum and dataclasses.replace(other, source="resident") == one
    asked = engines[0].calls
    alone = "context" in name and runner.rank != 0
    assert len(asked) == (0 if alone else 3), asked


def check_failures(runner: Runner) -> None:
    """An engine that fails one replica, or answers with another step's rollouts, ends the step on all ranks, rolled back."""
    folder = runner.folder / "replicas-store"
    seen = {}

    def fail_on_rank_1(trainer):
        failure = ConnectionResetError("the server hung up") if runner.rank == 1 else None
        put_engine(trainer, RecordedEngine(RolloutStore(folder), None, failure=failure, fails_at=2))
        seen["trainer"] = trainer

    saved = runner.folder / "hung-up-saved"
    flags = f"{REPLICAS} --save {saved} --save-interval 9"
    message = failure_of(runner, "hung-up", flags, StepRejected, prepare=fail_on_rank_1)
    assert message == "--rollout-engine vllm gave no rollouts for step 2: the server hung up", message
    trainer = seen["trainer"]
    assert trainer.order.state_dict()["position"] == 3 and (saved / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert not any(parameter.main_grad.any() for parameter in trainer.step.engine.model.parameters())

    def hold_version_1(trainer):
        put_engine(trainer, RecordedEngine(RolloutStore(folder), 1))

    message = failure_of(runner, "other-version", REPLICAS, StepRejected, prepare=hold_version_1)
    assert message.endswith("the engine holds weights of version 1, not 0"), message

    def cannot_follow(trainer):
        def follow(version):
            raise ValueError(f"version {version} cannot be had from there")

        put_engine(trainer, RecordedEngine(RolloutStore(folder), 0), follow=follow if runner.rank == 0 else None)

    message = failure_of(runner, "left-behind", REPLICAS, StepRejected, prepare=cannot_follow)
    assert message.startswith("--rollout-engine vllm cannot have the weights of version 1: version 1 cannot be"), message

    def answer_of_another_step(trainer):
        put_engine(trainer, (Misplaced if runner.rank == 0 else RecordedEngine)(RolloutStore(folder), None))

    message = failure_of(runner, "misplaced", REPLICAS, StepRejected, prepare=answer_of_another_step)
    assert "was sampled by weights of version 1, and version 0 is needed" in message, message


class Misplaced(RecordedEngine):
    """Says of every sample that newer weights sampled it."""

    def generate(self, requests, **settings):
        return [
            [dataclasses.replace(sample, weight_version=sample.weight_version + 1) for sample in samples]
            for samples in super().generate(requests, **settings)
        ]


def check_failed_rewards(runner: Runner) -> None:
    """Rewards that fail one replica end the step, or the evaluation, of both."""

    def fail_on_rank_1(trainer):
        original = trainer.scorer.score

        def score(prompts, groups):
            original(prompts, groups)
            if runner.rank == 1 and (trainer.order.state_dict()["position"] == 6 or len(groups[0].samples) == 1):
                raise RewardFailure("1 of 12 samples have no reward")

        trainer.scorer.score = score

    message = failure_of(runner, "no-reward", f"{REPLICAS} --group-filter drop_uniform", StepRejected, prepare=fail_on_rank_1)
    assert message == "1 of 12 samples have no reward", message
    assert len((runner.folder / "no-reward" / "metrics.jsonl").read_text().splitlines()) == 1
    message = failure_of(runner, "no-evaluation", f"{REPLICAS} {runner.evaluated}", StepRejected, prepare=fail_on_rank_1)
    assert message == "1 of 12 samples have no reward", message


def check_following(runner: Runner) -> None:
    """An engine is brought to each step's weights before any prompt goes to it, by one rank."""
    followed = []

    def prepare(trainer):
        engine = RecordedEngine(RolloutStore(runner.folder / "context-store"), 0)

        def follow(version):
            followed.append(version)
            engine.version = version

        put_engine(trainer, engine, follow=follow if runner.rank == 0 else None)

    runner.run("following", "", prepare=prepare)
    assert runner.receipt("following")["model"]["final_weights"] == runner.receipt("context-made")["model"]["final_weights"]
    assert followed == ([1, 2] if runner.rank == 0 else []), followed


def check_reuse(runner: Runner) -> None:
    """A run through an engine that finds a step in its store does not ask for it again; resumed, it goes on from there."""
    folder, reused = RolloutStore(runner.folder / "context-store"), runner.folder / "reused-store"
    if runner.rank == 0:
        groups, manifest = folder.read(folder.read_manifest(1)), folder.read_manifest(1)
        RolloutStore(reused).write(groups, manifest)
    engines = []

    def prepare(trainer):
        engines.append(RecordedEngine(folder, None))
        put_engine(trainer, engines[0])
        sampled, sampler = trainer.rollouts, trainer.sampler
        manifest = folder.read_manifest(1)
        sampled.store = StoreWriter(
            RolloutStore(reused), source="vllm", settings=manifest.settings, replica=trainer.scorer.replica, dp=sampled.dp
        )
        stored = StoredRollouts(
            RolloutStore(reused), trainer.scorer, order=trainer.order, settings=manifest.settings,
            stop_ids=sampler.stop_ids, num_tokens=sampler.num_tokens, replica=trainer.scorer.replica, dp=sampled.dp,
            device=sampler.device,
        )
        trainer.rollouts = ReusedRollouts(stored, sampled)

    runner.run("reused", "", prepare=prepare)
    assert runner.receipt("reused")["model"]["final_weights"] == runner.receipt("context-made")["model"]["final_weights"]
    assert len(engines[0].calls) == (2 if runner.rank == 0 else 0) and RolloutStore(reused).list_steps() == [1, 2, 3]


def check_routes(runner: Runner) -> None:
    """Experts over two ranks: routes that the resident engine recorded go through the store and train to the same bits."""
    runner.model, model = "", runner.model
    store = runner.folder / "routed-store"
    made = runner.run("routed-made", f"{ROUTED} --rollout-store {store}")
    read = runner.run("routed-read", f"{ROUTED} --rollouts-from {store}")
    assert without_measured(made) == without_measured(read) and made[0]["ratio_mean"] == 1.0
    weights = [runner.receipt(f"routed-{kind}")["model"]["final_weights"] for kind in ("made", "read")]
    assert weights[0] == weights[1]
    (group,) = RolloutStore(store).read(RolloutStore(store).read_manifest(1))
    assert all(sample.routes.to_tensor().shape == (len(sample.token_ids), 2, 2) for sample in group.samples)
    free = runner.folder / "unrouted-store"
    runner.run("unrouted-made", f"{ROUTED.replace('--rollout-router-replay', '')} --train-iters 1 --rollout-store {free}")
    message = failure_of(runner, "unrouted", f"{ROUTED} --rollouts-from {free}", StepRejected)
    assert "response 0 comes without the experts that its rows went to, which --rollout-router-replay" in message, message
    runner.model = model


def main(rank: int, ranks: int, arguments: list[str]) -> None:
    """Every scenario."""
    runner = Runner(rank, ranks, Path(arguments[0]))
    check_same_run(runner, "context", "")
    check_same_run(runner, "replicas", REPLICAS)
    check_failures(runner)
    check_failed_rewards(runner)
    check_following(runner)
    check_reuse(runner)
    check_routes(runner)
    runner.end()


if __name__ == "__main__":
    fork_ranks(main)
