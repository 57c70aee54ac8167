"""One rank of `test_rollout_store.py`: runs that write a rollout store, and runs that train from it.

    rollout_store_ranks.py 2 RENDEZVOUS FOLDER
"""

import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from training_ranks import Runner, without_measured

from longstraw.rollout.store import RolloutStore
from longstraw.transaction.commit import StepRejected
from tests.support.ranks import fork_ranks

REPLICAS = "--context-parallel-size 1 --prompts-per-step 3 --group-filter drop_uniform"


def check_bit_for_bit(runner: Runner, name: str, flags: str) -> None:
    """A run that samples, and one that trains from what it left: the same weights, metrics and data position."""
    folder = runner.folder / f"{name}-store"
    made = runner.run(f"{name}-made", f"{flags} --rollout-store {folder} --save {runner.folder}/{name}-made-ckpt")
    read = runner.run(f"{name}-read", f"{flags} --rollouts-from {folder} --save {runner.folder}/{name}-read-ckpt")
    assert [record["step"] for record in made] == [1, 2, 3]
    assert without_measured(made) == without_measured(read), (made, read)
    weights = [runner.receipt(f"{name}-{kind}")["model"]["final_weights"] for kind in ("made", "read")]
    assert weights[0] == weights[1], weights
    further = [
        runner.run(f"{name}-{kind}-further", f"{flags} --load {runner.folder}/{name}-{kind}-ckpt --train-iters 4")
        for kind in ("made", "read")
    ]
    assert without_measured(further[0]) == without_measured(further[1]), further


def check_writing_changes_nothing(runner: Runner) -> None:
    """A run that leaves no store ends where the one that left it did."""
    plain = runner.run("plain", "")
    made = [json.loads(line) for line in (runner.folder / "context-made" / "metrics.jsonl").read_text().splitlines()]
    assert without_measured(plain) == without_measured(made), (plain, made)
    assert runner.receipt("plain")["model"]["final_weights"] == runner.receipt("context-made")["model"]["final_weights"]


def check_other_replicas(runner: Runner) -> None:
    """What two replicas wrote trains one, and the other way round; sums differ in their order alone."""
    one = "--context-parallel-size 2 --prompts-per-step 3 --group-filter drop_uniform"
    for source, flags in (("replicas", one), ("context", "--context-parallel-size 1")):
        made = [json.loads(line) for line in (runner.folder / f"{source}-made" / "metrics.jsonl").read_text().splitlines()]
        (read, *_) = runner.run(f"{source}-elsewhere", f"{flags} --rollouts-from {runner.folder}/{source}-store")
        assert read["reward_mean"] == made[0]["reward_mean"]
        assert abs(read["grad_norm"] - made[0]["grad_norm"]) <= 1e-4 * made[0]["grad_norm"], (read, made[0])


def check_refusals(runner: Runner) -> None:
    """Rollouts that are not this run's, or not there, end every rank alike, with the steps before saved."""
    store = runner.folder / "context-store"
    for name, flags, fragment in (
        ("warm", "--sampling-temperature 0.5", "sampled with --sampling-temperature 1.0, unlike this run's"),
        ("seeds", "--prompt-order-seed 3", "other data (seed 0 then and 3 now)"),
        ("initial", "--init-method-std 0.03", "by other weights of version 0 than this run's: the runs started from other"),
        ("whole", f"--rollout-store {store} --rollouts-from {runner.folder}/none", "samples nothing, which --rollout-store"),
        ("fresh", f"--rollout-store {store}", "holds the rollouts of another run"),
    ):
        given = flags if "--rollout-store" in flags else f"{flags} --rollouts-from {store}"
        message = failure_of(runner, f"refused-{name}", given, ValueError)
        assert fragment in message and "\n" not in message, message
    message = failure_of(runner, "other-rate", f"--rollouts-from {store} --lr 1e-4", StepRejected)
    assert "step 2 of" in message and "by other weights of version 1 than this run's" in message, message
    torn = runner.folder / "torn"
    if runner.rank == 0:
        shutil.copytree(store, torn)
        path = torn / "step-000002.parquet"
        path.write_bytes(path.read_bytes()[:-9] + b"somewhere")
        (torn / "step-000003.json").unlink()
    saved = runner.folder / "torn-saved"
    message = failure_of(runner, "torn", f"--rollouts-from {torn} --save {saved} --save-interval 9", StepRejected)
    assert "step-000002.parquet is damaged" in message, message
    assert (saved / "latest_checkpointed_iteration.txt").read_text().strip() == "1"
    if runner.rank == 0:
        shutil.copy(store / "step-000002.parquet", torn)
    message = failure_of(runner, "short", f"--rollouts-from {torn}", StepRejected)
    assert "holds no rollouts of step 3 (it has steps 1 to 2)" in message, message


def check_full_disk(runner: Runner) -> None:
    """A store that cannot take a step ends it on every replica, before anything is trained."""

    def fill_disk(trainer):
        def write(groups, manifest):
            raise OSError(28, "No space left on device")

        trainer.rollouts.store.store.write = write  # on every rank; the first alone writes

    flags = f"{REPLICAS} --rollout-store {runner.folder}/full-store"
    message = failure_of(runner, "full", flags, StepRejected, prepare=fill_disk)
    assert "full-store cannot take step 1: [Errno 28] No space left on device" in message, message
    assert not (runner.folder / "full" / "metrics.jsonl").read_text()


def check_resumed_writer(runner: Runner) -> None:
    """A run that goes on from step 1 samples steps 2 and 3 anew and leaves a store that trains to the same weights."""
    folder, saved = runner.folder / "resumed-store", runner.folder / "resumed-ckpt"
    runner.run("resumed-first", f"--rollout-store {folder} --save {saved} --save-interval 1")
    before = RolloutStore(folder).read_manifest(3)
    runner.run("resumed-on", f"--rollout-store {folder} --load {saved} --ckpt-step 1")
    assert RolloutStore(folder).list_steps() == [1, 2, 3] and RolloutStore(folder).read_manifest(3) == before
    assert runner.receipt("resumed-on")["model"]["final_weights"] == runner.receipt("context-made")["model"]["final_weights"]


def failure_of(runner: Runner, name: str, flags: str, kind: type[Exception], *, prepare=None) -> str:
    """The message of the exception that a run must end with, on this rank."""
    try:
        runner.run(name, flags, prepare=prepare)
    except kind as error:
        return str(error)
    raise AssertionError(f"{name} was not refused")


def main(rank: int, ranks: int, arguments: list[str]) -> None:
    """Every scenario."""
    runner = Runner(rank, ranks, Path(arguments[0]))
    check_bit_for_bit(runner, "context", "")
    check_bit_for_bit(runner, "replicas", REPLICAS)
    check_writing_changes_nothing(runner)
    check_other_replicas(runner)
    check_refusals(runner)
    check_full_disk(runner)
    check_resumed_writer(runner)
    runner.end()


if __name__ == "__main__":
    fork_ranks(main)
