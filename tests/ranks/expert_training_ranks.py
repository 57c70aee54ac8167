"""One rank of `test_expert_training.py`: the training program on models with experts, at several parallel sizes.

    expert_training_ranks.py 2 RENDEZVOUS FOLDER
"""

from pathlib import Path

from tests.ranks.training_ranks import Runner
from tests.support.ranks import fork_ranks

EXPERTS = "--model-preset tiny-qwen3-moe --num-layers 2 --train-iters 2"
SPARSE = "--model-preset tiny-glm5.2 --num-layers 4 --moe-layer-freq [0,1,1,1] --train-iters 2 --page-residency host"


def same_figures(found: list[dict], wanted: list[dict]) -> None:
    """Loss, norm and rewards of every step agree to float32 rounding: the same tokens were sampled and trained on."""
    assert len(found) == len(wanted) == 2
    for ours, theirs in zip(found, wanted):
        for name in ("loss", "grad_norm", "reward_mean", "response_tokens_mean", "kl"):
            assert abs(ours[name] - theirs[name]) <= 1e-4 * abs(theirs[name]) + 1e-6, (name, ours[name], theirs[name])


def check_context_parallel(runner: Runner) -> None:
    """Experts over the context-parallel ranks give the run that each rank with all experts gives."""
    wanted = runner.run("cp2-ep1", f"{EXPERTS} --expert-model-parallel-size 1")
    found = runner.run("cp2-ep2", f"{EXPERTS} --expert-model-parallel-size 2")
    same_figures(found, wanted)
    if runner.rank == 0:
        receipt = runner.receipt("cp2-ep2")
        assert receipt["topology"]["expert_model_parallel_size"] == 2
        assert receipt["model"]["parameters"] == runner.receipt("cp2-ep1")["model"]["parameters"]
        assert any(entry["kind"] == "routing" for entry in receipt["state"])


def check_replicas_that_share_experts(runner: Runner) -> None:
    """Two replicas with prompts, responses and a reference of their own, whose experts serve each other in every phase."""
    flags = f"{EXPERTS} --context-parallel-size 1 --prompts-per-step 3 --kl-coefficient 0.1"
    wanted = runner.run("dp2-ep1", flags)
    found = runner.run("dp2-ep2", f"{flags} --expert-model-parallel-size 2")
    same_figures(found, wanted)


def check_sparse_model(runner: Runner) -> None:
    """Latent attention, selections and experts over two ranks: ended early, saved, and gone on with without expert
    parallelism."""
    save = f"--save {runner.folder}/sparse --load {runner.folder}/sparse --save-interval 1"
    whole = runner.run("glm", f"{SPARSE} --expert-model-parallel-size 2")
    first = runner.run("glm-first", f"{SPARSE} --expert-model-parallel-size 2 {save} --exit-interval 1")
    assert [record["step"] for record in first] == [1]
    rest = runner.run("glm-rest", f"{SPARSE} --expert-model-parallel-size 1 {save}")
    assert [record["step"] for record in rest] == [2]
    for name in ("loss", "grad_norm"):
        assert abs(rest[0][name] - whole[1][name]) <= 1e-3 * abs(whole[1][name]) + 1e-6, (name, rest[0], whole[1])


def main(rank: int, ranks: int, arguments: list[str]) -> None:
    folder, *only = arguments
    runner = Runner(rank, ranks, Path(folder), model="")
    for check in (check_context_parallel, check_replicas_that_share_experts, check_sparse_model):
        if only and check.__name__ not in only:
            continue
        check(runner)
        if rank == 0:
            print(check.__name__, flush=True)
    runner.end()


if __name__ == "__main__":
    fork_ranks(main)
