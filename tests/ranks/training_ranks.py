"""One rank of `test_training.py`: the training program's `run`, several times in one process, on small recall data.

    training_ranks.py 2 RENDEZVOUS FOLDER

FOLDER holds the data that the test made; every scenario writes below it and asserts on what it finds.
"""

import gc
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from longstraw.transaction.commit import StepRejected
from megatron.grpo import train
from megatron.grpo.arguments import parse_arguments
from megatron.grpo.initialize import shut_down
from megatron.grpo.rewards import RewardFailure
from megatron.grpo.trainer import Trainer
from tests.support.ranks import fork_ranks, join_world, leave_world

HYBRID = "--model-preset tiny-qwen3.6 --num-layers 2 --linear-attention-freq 2"
STEPS = 3
MEASURED = {"seconds", "peak_bytes"}


class Runner:
    """Runs scenarios one after another, each in a world of its own."""

    def __init__(self, rank: int, ranks: int, folder: Path, model: str = HYBRID):
        self.rank, self.ranks, self.folder, self.model, self.count = rank, ranks, folder, model, 0
        self.evaluated = f"--eval-data {folder}/data/eval.jsonl --eval-samples 3"
        leave_world()

    def run(self, name: str, flags: str = "", *, prepare=None) -> list[dict]:
        """`run` with the given flags -> the metrics it left; `prepare(trainer)` may tamper before the first step."""
        data = self.folder / "data"
        argv = (
            f"{self.model} --context-parallel-size 2 --prompt-data {data}/train.jsonl "
            f"--tokenizer-path {data}/tokenizer --train-iters {STEPS} --lr 1e-3 "
            f"--group-size 4 --max-response-length 3 --prompt-chunk-size 20 --seed 5 --reward-workers 1 "
            f"--reward tests/ranks/sample_reward.py:letters --output-dir {self.folder}/{name} {flags}"
        ).split()
        os.environ |= {"RANK": str(self.rank), "LOCAL_RANK": str(self.rank), "WORLD_SIZE": str(self.ranks)}
        self._join()
        original = Trainer.train

        def tampered(trainer, first_step):
            if prepare is not None:
                prepare(trainer)
            return original(trainer, first_step)

        Trainer.train = tampered
        try:
            train.run(*parse_arguments(argv))
        finally:
            Trainer.train = original
            shut_down()
            gc.collect()  # a group's threads live until its last reference is gone
        path = self.folder / name / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def receipt(self, name: str) -> dict:
        """A finished run's receipt."""
        return json.loads((self.folder / name / "receipt.json").read_text())

    def _join(self) -> None:
        self.count += 1
        join_world(str(self.count), self.rank, self.ranks)

    def end(self) -> None:
        """Back to a world, as `fork_ranks` expects."""
        self._join()


def is_training(groups) -> bool:
    """Whether groups are a step's, not an evaluation's, which have one sample each."""
    return len(groups[0].samples) > 1


def without_measured(records: list[dict]) -> list[dict]:
    """Metrics without what the clock and the allocator decide."""
    return [{key: value for key, value in record.items() if key not in MEASURED} for record in records]


def check_whole_run(runner: Runner) -> list[dict]:
    """Metrics, receipt, checkpoints; the first ratio is exactly 1."""
    saved = runner.folder / "saved"
    records = runner.run("whole", f"{runner.evaluated} --save {saved} --save-interval 2")
    assert [record["step"] for record in records] == [1, 2, 3], records
    assert "eval_reward_mean" in records[0] and "eval_reward_mean" in records[-1], records
    assert all(record["ratio_mean"] == 1.0 and record["kl"] == 0.0 for record in records), records
    assert any(record["grad_norm"] > 0 for record in records), "no step had a gradient"
    receipt = runner.receipt("whole")
    assert receipt["semantics"] == "exact" and receipt["topology"]["context_parallel_size"] == 2
    assert receipt["model"]["initial_weights"] != receipt["model"]["final_weights"]
    assert {item["kind"] for item in receipt["state"]} >= {"kv_pages", "recurrent_state", "kv_adjoint"}, receipt["state"]
    check_step_receipts(runner.folder / "whole", receipt, records)
    assert (runner.folder / "whole" / "run.png").stat().st_size > 5_000
    assert list((runner.folder / "whole" / "tensorboard").glob("events.*"))
    return records


def check_step_receipts(folder: Path, whole: dict, records: list[dict]) -> None:
    """One for each step, whose weights, tokens and seconds add up to the run's."""
    steps = [json.loads(path.read_text()) for path in sorted((folder / "receipts").glob("step-*.json"))]
    assert [step["results"]["last_step"] for step in steps] == [record["step"] for record in records]
    weights = [steps[0]["model"]["initial_weights"], *(step["model"]["final_weights"] for step in steps)]
    assert weights[0] == whole["model"]["initial_weights"] and weights[-1] == whole["model"]["final_weights"]
    assert all(step["model"]["initial_weights"] == before for step, before in zip(steps, weights))
    for name, total in whole["tokens"].items():
        assert sum(step["tokens"][name] for step in steps) == total > 0, name
    assert abs(sum(step["seconds"]["replay"] for step in steps) - whole["seconds"]["replay"]) < 1e-6
    for use in whole["collectives"]:
        group, operation = use["group"], use["operation"]
        of_steps = sum(u["calls"] for s in steps for u in s["collectives"] if (u["group"], u["operation"]) == (group, operation))
        assert of_steps <= use["calls"] <= of_steps + 5, use  # after the last step: whether to end, and the save
    for step, record in zip(steps, records):
        assert step["metrics"] == record and step["phase_tokens"]["prompt_reverse"] == step["tokens"]["prompt_tokens"]
        uses = {(use["group"], use["operation"]): use for use in step["collectives"]}
        assert uses["cp", "all_to_all"]["bytes"] > 0 and uses["cp", "all_reduce"]["calls"] > 0, uses
        for memory in step["memory"]:
            assert memory["phases"].keys() >= {"capture", "responses", "prompt_reverse", "commit"}, memory
            assert memory["categories"].keys() == {"weights", "gradients", "optimizer", "prompt_state", "adjoints"}, memory
        assert step["staleness"] == {"policy": "recapture", "prefix_age_steps": 0, "rollout_lag_steps": 0}
        assert {moment["phase"] for moment in step["memory_over_time"]} >= {"capture", "prompt_reverse"}
        assert step["state"] and all(check["passed"] for check in step["checks"]) and len(step["checks"]) == 3


def check_resume(runner: Runner, whole: list[dict]) -> None:
    """A run resumed in the middle ends bit for bit where the whole run ends."""
    records = runner.run("resumed", f"{runner.evaluated} --load {runner.folder}/saved --ckpt-step 2")
    assert [record["step"] for record in records] == [3]
    records[0].pop("eval_reward_mean_before")  # every run's first record has it, whole's is of step 1
    assert without_measured(records)[-1] == without_measured(whole)[-1], (records[-1], whole[-1])
    assert runner.receipt("resumed")["model"]["final_weights"] == runner.receipt("whole")["model"]["final_weights"]


def check_signal(runner: Runner) -> None:
    """SIGTERM on one rank in the middle of step 3: rolled back, saved, and the resumed run ends where the whole one does."""

    def stop_in_step_3(trainer):
        original = trainer.scorer.score

        def score(prompts, groups):
            original(prompts, groups)
            if is_training(groups) and trainer.order.state_dict()["position"] == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        trainer.scorer.score = score

    saved = runner.folder / "stopped-saved"
    records = runner.run("stopped", f"--save {saved} --save-interval 100", prepare=stop_in_step_3)
    assert [record["step"] for record in records] == [1, 2], records
    assert (saved / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    runner.run("continued", f"--load {saved}")
    assert runner.receipt("continued")["model"]["final_weights"] == runner.receipt("whole")["model"]["final_weights"]


def check_rollback(runner: Runner) -> None:
    """A NaN in one rank's gradient: the step is rejected by name and leaves everything as it was."""
    seen = {}

    def poison(trainer):
        model = trainer.step.engine.model
        parameter = dict(model.named_parameters())["decoder.layers.1.mlp.linear_fc2.weight"]
        if dist.get_rank() == 1:
            parameter.register_hook(lambda grad: grad * float("nan"))
        seen["trainer"], seen["order"] = trainer, trainer.order.state_dict()
        seen["weights"] = {name: p.detach().clone() for name, p in model.named_parameters()}
        seen["random"] = torch.get_rng_state().clone()

    try:
        runner.run("poisoned", prepare=poison)
    except StepRejected as error:
        assert "decoder.layers.1.mlp.linear_fc2.weight" in str(error), error
    else:
        raise AssertionError("a NaN gradient was not rejected")
    trainer = seen["trainer"]
    assert trainer.order.state_dict() == seen["order"]
    assert torch.equal(torch.get_rng_state(), seen["random"])
    for name, parameter in trainer.step.engine.model.named_parameters():
        assert torch.equal(parameter, seen["weights"][name]), name
        assert not parameter.main_grad.any(), name
    for state in trainer.update.optimizer.optimizer.state.values():
        assert not state["exp_avg"].any() and state["step"] == 0


def check_early_end(runner: Runner) -> None:
    """--exit-duration-in-mins ends the run after a step, saved; one rank's clock decides for all.

    --exit-interval does in expert_training_ranks.py.
    """

    def pretend_to_be_late(trainer):
        trainer.started -= 60 * 6 * dist.get_rank()

    saved = runner.folder / "duration-saved"
    flags = f"--exit-duration-in-mins 5 --save {saved} --save-interval 100"
    records = runner.run("duration", flags, prepare=pretend_to_be_late)
    assert [record["step"] for record in records] == [1], records
    assert (saved / "latest_checkpointed_iteration.txt").read_text().strip() == "1"


def check_filter_over_replicas(runner: Runner) -> None:
    """One replica's groups are dropped and sampled again, the other's are not: both stay at one place of the data.

    With the settings of Dr.GRPO.
    """
    seen = {}

    def drop_on_rank_1(trainer):
        original, calls = trainer.scorer.score, []

        def score(prompts, groups):
            original(prompts, groups)
            for group in groups if is_training(groups) else ():
                first = not calls and dist.get_rank() == 1
                group.rewards = [1.0] * len(group.rewards) if first else [float(i) for i in range(len(group.rewards))]
                calls.append([prompt.prompt_id for prompt in prompts])

        trainer.scorer.score, seen["trainer"], seen["calls"] = score, trainer, calls

    flags = "--context-parallel-size 1 --prompts-per-step 2 --group-filter drop_uniform --train-iters 2 " \
            "--loss-aggregation group_constant --loss-constant 3 --no-advantage-std-normalization"
    records = runner.run("filtered", flags, prepare=drop_on_rank_1)
    assert [record["step"] for record in records] == [1, 2]
    place = seen["trainer"].order.state_dict()
    assert place["position"] == 6, place  # 2 a step, and 2 more in the first, of which one was used
    assert len(seen["calls"]) == 2 + runner.rank, seen["calls"]


def check_refusals(runner: Runner) -> None:
    """What would train on other data, another schedule, or over another run's checkpoints, unless a flag says so."""
    saved = runner.folder / "saved"
    for name, flags, fragments in (
        ("too-few", "--prompts-per-step 17", ["--prompts-per-step 17 is more than the 16 prompts of --prompt-data"]),
        ("other-rate", f"--load {saved} --lr 1e-4 --train-iters 4", ["--lr 0.001 (now 0.0001)", "--override-opt-param-sch"]),
        ("foreign", f"--save {saved} --save-interval 2", [f"--save {saved} holds a checkpoint of step 3", "--load"]),
    ):
        try:
            runner.run(name, flags)
        except ValueError as error:
            assert all(fragment in str(error) for fragment in fragments) and "\n" not in str(error), error
        else:
            raise AssertionError(f"{name} was not refused")


def check_extension(runner: Runner) -> None:
    """A finished run goes on for more steps, on other ranks, and at another rate where the flag asks for it."""
    start = f"--load {runner.folder}/saved --train-iters 4"
    (further,) = runner.run("further", start)
    (slower,) = runner.run("slower", f"{start} --lr 1e-4 --override-opt-param-scheduler")
    (kept,) = runner.run("kept", f"{start} --lr 1e-4 --use-checkpoint-opt-param-scheduler")
    assert [record["step"] for record in (further, slower, kept)] == [4, 4, 4]
    assert [record["learning_rate"] for record in (further, slower, kept)] == [1e-3, 1e-4, 1e-3]
    assert further["grad_norm"] == slower["grad_norm"] == kept["grad_norm"], (further, slower, kept)
    (tensor,) = runner.run("tensor", f"--context-parallel-size 1 --tensor-model-parallel-size 2 --sequence-parallel {start}")
    assert abs(tensor["grad_norm"] - further["grad_norm"]) <= 1e-4 * further["grad_norm"], (tensor, further)


def check_failed_rewards(runner: Runner) -> None:
    """A masked reward is not in the mean; one that ends the run leaves the steps before it saved."""
    flags = "--reward tests/ranks/sample_reward.py:five_or_nothing --reward-failure mask --train-iters 1"
    (masked,) = runner.run("masked", flags)
    assert masked["reward_errors"] > 0 and masked["reward_mean"] in (0.0, 5.0), masked

    def fail_in_step_2(trainer):
        original = trainer.scorer.score

        def score(prompts, groups):
            original(prompts, groups)
            if is_training(groups) and trainer.order.state_dict()["position"] == 2 and dist.get_rank() == 1:
                raise RewardFailure("1 of 4 samples have no reward (--reward-failure stop)")

        trainer.scorer.score = score

    saved = runner.folder / "failed-saved"
    try:
        runner.run("failed", f"--save {saved} --save-interval 100", prepare=fail_in_step_2)
    except StepRejected as error:
        assert "--reward-failure stop" in str(error), error
    else:
        raise AssertionError("a failed reward did not end the run")
    assert (saved / "latest_checkpointed_iteration.txt").read_text().strip() == "1"


def check_empty_step(runner: Runner) -> None:
    """Every response truncated and left out: the weights stay, the run goes on."""
    records = runner.run("empty", "--mask-truncated --max-response-length 1 --train-iters 2")
    assert [record["grad_norm"] for record in records] == [0.0, 0.0], records
    weights = runner.receipt("empty")["model"]
    assert weights["initial_weights"] == weights["final_weights"]


def check_objectives(runner: Runner, whole: list[dict]) -> None:
    """Other settings run: a reference with GSPO, response-only, batched replay, data parallel."""
    records = runner.run("reference", "--kl-coefficient 0.1 --importance-level sequence --loss-aggregation sequence "
                         "--train-iters 2")
    assert records[0]["kl"] == 0.0 and records[1]["kl"] > 0.0, records
    constant = runner.run("constant", "--semantics response_only --train-iters 1")
    assert constant[0]["reward_mean"] == whole[0]["reward_mean"] and constant[0]["grad_norm"] != whole[0]["grad_norm"]
    batched = runner.run("batched", "--responses-per-replay 4 --page-residency host --adjoint-residency host "
                         "--attention-output-residency host --train-iters 1")
    assert abs(batched[0]["grad_norm"] - whole[0]["grad_norm"]) <= 1e-4 * whole[0]["grad_norm"]
    data = runner.run("data", "--context-parallel-size 1 --prompts-per-step 2 --train-iters 1")
    alone = runner.run("two-prompts", "--prompts-per-step 2 --train-iters 1")
    assert abs(data[0]["grad_norm"] - alone[0]["grad_norm"]) <= 1e-4 * alone[0]["grad_norm"], (data, alone)
    assert data[0]["reward_mean"] == alone[0]["reward_mean"]


def main(rank: int, ranks: int, arguments: list[str]) -> None:
    """Every scenario."""
    runner = Runner(rank, ranks, Path(arguments[0]))
    whole = check_whole_run(runner)
    check_resume(runner, whole)
    check_signal(runner)
    check_rollback(runner)
    check_early_end(runner)
    check_filter_over_replicas(runner)
    check_refusals(runner)
    check_extension(runner)
    check_failed_rewards(runner)
    check_empty_step(runner)
    check_objectives(runner, whole)
    runner.end()


if __name__ == "__main__":
    fork_ranks(main)
