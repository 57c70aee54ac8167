"""One response a prompt under LoGRA on two replicas: the running mean of rewards is state of the run. For `logra_ranks.py`."""

from longstraw.transaction.commit import StepRejected
from tests.ranks.training_ranks import HYBRID, Runner, without_measured

FLAGS = (
    f"{HYBRID} --optimizer logra --logra-rank 4 --kl-budget 1e-3 --context-parallel-size 1 --prompts-per-step 2 "
    "--group-size 1 --advantage-estimator running_mean --no-advantage-std-normalization"
)


def check_running_mean(runner: Runner) -> None:
    """Each step compares with the mean of the steps before, of both replicas; gone on with bit for bit; rolled back."""
    seen: dict = {}
    save = f"--save {runner.folder}/mean-saved --save-interval 2"
    records = runner.run("mean", f"{FLAGS} {save}", prepare=lambda trainer: seen.update(whole=trainer))
    rewards = [record["reward_mean"] for record in records]
    expected = [0.0, rewards[0], (rewards[0] + rewards[1]) / 2]
    assert len(set(rewards)) == 3 and all(record["grad_norm"] > 0 for record in records), records
    for record, mean in zip(records, expected):
        assert abs(record["reward_baseline"] - mean) <= 1e-15, (record, mean)
    baseline = seen["whole"].baseline  # of this rank; the metrics are the first one's
    assert baseline.count == 6 and abs(baseline.value - sum(rewards) / 3) <= 1e-15

    again = runner.run(
        "mean-again", f"{FLAGS} --load {runner.folder}/mean-saved --ckpt-step 2",
        prepare=lambda trainer: seen.update(again=trainer),
    )
    assert without_measured(again) == without_measured(records[2:]), (again, records[2:])
    assert seen["again"].baseline == baseline
    model = [runner.receipt(name)["model"]["final_weights"] for name in ("mean", "mean-again")]
    assert model[0] == model[1]

    def fail_in_step_2(trainer):
        seen["failed"], original = trainer, trainer.update.take

        def take(number, groups):
            moved = original(number, groups)
            if number == 2:
                raise StepRejected("step 2 is rejected")
            return moved

        trainer.update.take = take

    try:
        runner.run("mean-failed", FLAGS, prepare=fail_in_step_2)
    except StepRejected as error:
        assert "step 2 is rejected" in str(error)
    else:
        raise AssertionError("step 2 was not rejected")
    state = seen["failed"].baseline.state_dict()
    assert state["count"] == 2 and abs(state["value"] - rewards[0]) <= 1e-15, (state, rewards)
