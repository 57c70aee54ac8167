"""A run of the training program whose groups come from a real vLLM server, which follows its weights; two replicas.

    engine_training.py 2 RENDEZVOUS FOLDER READY_FILE

Then the same run from the rollouts that it left, and the next step's rollouts without a model.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from longstraw.rollout.store import RolloutStore
from megatron.grpo.arguments import Machine, parse_arguments
from megatron.grpo.rollout_only import roll_out_only
from tests.ranks.training_ranks import Runner, without_measured
from tests.support.ranks import fork_ranks

FLAGS = (
    "--model-preset tiny-llama --init-method-std 0.06 --context-parallel-size 1 --prompts-per-step 3 --train-iters 2 "
    "--sampling-temperature 0.7"
)
BAR = 1e-5 / 0.7  # of float32 log-probabilities at temperature 1


def train_on_the_engine(runner: Runner, ready_file: str) -> Path:
    """Two steps; the sampler has the trainer's log-probabilities at each. Returns the store."""
    store, sync = runner.folder / "vllm-store", f"--weight-sync full --weight-sync-dir {runner.folder}/vllm-weights"
    engine = f"--rollout-engine vllm --rollout-server {ready_file} --rollout-store {store}"
    records = runner.run("vllm", f"{FLAGS} {engine} {sync} --rollout-is token")
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert record["ratio_mean"] == 1.0 and record["rollout_log_ratio_max"] <= BAR, record
        assert abs(record["rollout_is_mean"] - 1.0) <= BAR and record["grad_norm"] > 0, record
    rollout = runner.receipt("vllm")["rollout"]
    assert rollout["source"] == rollout["sampled_by"] == "vllm" and rollout["log_ratio_max"] <= BAR, rollout
    again = runner.run("vllm-read", f"{FLAGS} --rollouts-from {store} --rollout-is token")
    ours = [{name: value for name, value in record.items() if not name.startswith("weight_sync")} for record in records]
    assert without_measured(ours) == without_measured(again), (records, again)
    weights = [runner.receipt(name)["model"]["final_weights"] for name in ("vllm", "vllm-read")]
    assert weights[0] == weights[1]
    return store


def generate_alone(runner: Runner, store: Path, ready_file: str) -> None:
    """The server is brought to the weights of version 2 and answers for step 3, which a run with a model can train on."""
    argv = (
        f"{FLAGS} --train-iters 3 --group-size 4 --max-response-length 3 --seed 5 --reward-workers 1 --reward "
        f"tests/ranks/sample_reward.py:letters --prompt-data {runner.folder}/data/train.jsonl --tokenizer-path "
        f"{runner.folder}/data/tokenizer --rollout-only --rollout-engine vllm --rollout-server {ready_file} "
        f"--rollout-store {store} --rollout-steps 2 --weight-sync full --weight-sync-dir {runner.folder}/vllm-weights"
    ).split()
    roll_out_only(*parse_arguments(argv, Machine(cuda=False, fused_adam=False, world_size=1)))
    manifest = RolloutStore(store).read_manifest(3)
    assert (manifest.weight_version, manifest.groups, manifest.rows) == (2, 3, 12)
    assert len(RolloutStore(store).read(manifest)) == 3


def main(rank: int, ranks: int, arguments: list[str]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    folder, ready_file = arguments
    runner = Runner(rank, ranks, Path(folder), "")
    store = train_on_the_engine(runner, ready_file)
    if rank == 0:  # the other waits at the end
        generate_alone(runner, store, ready_file)
    runner.end()


if __name__ == "__main__":
    fork_ranks(main)
