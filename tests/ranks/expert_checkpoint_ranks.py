"""Checkpoints of experts over two ranks: saved at one expert-parallel size, gone on with at another.

Run by test_expert_checkpoint.py with a scratch folder. Each check's name is printed as it passes.
"""

import os

import torch

from megatron.grpo.checkpointing import load_checkpoint, save_checkpoint
from tests.ranks.training_state import TrainingState, assert_same
from tests.support.ranks import fork_ranks

MODEL = "--model-preset tiny-glm5.2 --num-layers 3 --moe-layer-freq [0,1,1] --dsa-indexer-topk-freq 2 "\
        "--dsa-indexer-skip-topk-offset 1 --max-response-length 8"
SIZES = [(2, 1), (2, 2), (1, 2), (1, 1)]
"""(context parallel, expert parallel) on two ranks."""


def load(state: TrainingState):
    return load_checkpoint(state.args, state.model, state.optimizer, state.scheduler, state.groups)


def save(state: TrainingState, iteration: int) -> None:
    save_checkpoint(
        state.args, iteration, state.model, state.optimizer, state.scheduler, state.groups,
        data_position={"epoch": 0, "position": iteration},
    )


def biases_of(state: TrainingState) -> dict[str, torch.Tensor]:
    return {n: b.clone() for n, b in state.model.named_buffers() if n.endswith("expert_bias")}


def check_weights_do_not_depend_on_the_sizes() -> None:
    """The same seed: the same weights at every size, and no two experts alike."""
    wanted = None
    for cp, ep in SIZES:
        found = TrainingState(MODEL, cp=cp, ep=ep).whole_weights()
        wanted = wanted or found
        assert_same(found, wanted)
    experts = [w for n, w in wanted.items() if "layers.2.mlp.experts" in n and n.endswith("linear_fc1.weight")]
    assert len(experts) == 16
    assert not any(torch.equal(a, b) for i, a in enumerate(experts) for b in experts[:i])


def check_resume(folder: str, saved: tuple[int, int], loaded: list[tuple[int, int]], flags: str = "") -> None:
    """2 steps, save, 2 steps at one size; load and 2 steps at others: the same weights, moments and norms."""
    flags = f"{MODEL} {flags} --save {folder} --load {folder} --save-interval 2"
    first = TrainingState(flags, cp=saved[0], ep=saved[1], seed=1)
    assert load(first) is None
    for bias in (b for n, b in first.model.named_buffers() if n.endswith("expert_bias")):
        bias.copy_(torch.randn(16, generator=torch.Generator().manual_seed(4)))
    first.train(1, 2)
    save(first, 2)
    weights, biases = first.whole_weights(), biases_of(first)
    norms, final = first.train(3, 4), first.whole_weights()
    for cp, ep in loaded:
        state = TrainingState(flags, cp=cp, ep=ep, seed=2)
        state.train(7, 7)
        resumed = load(state)
        assert resumed.iteration == 2 and state.scheduler.num_steps == 2
        assert_same(state.whole_weights(), weights)
        assert_same(biases_of(state), biases)
        found = state.train(3, 4)
        assert all(abs(a - b) <= 1e-5 * b for a, b in zip(found, norms)), (found, norms)
        for name, weight in state.whole_weights().items():
            assert torch.allclose(weight, final[name], rtol=max(1e-4, torch.finfo(weight.dtype).eps), atol=1e-6), name


def main(rank, ranks, arguments):
    scratch, *only = arguments
    os.environ["WORLD_SIZE"] = str(ranks)  # as torchrun says it; the flags are checked against it
    checks = {
        "weights": check_weights_do_not_depend_on_the_sizes,
        "saved at cp2 ep2": lambda: check_resume(f"{scratch}/cp2-ep2", (2, 2), SIZES),
        "saved at cp2 ep1": lambda: check_resume(f"{scratch}/cp2-ep1", (2, 1), [(2, 2)]),
        "saved at cp1 ep2": lambda: check_resume(f"{scratch}/cp1-ep2", (1, 2), [(1, 1)]),
        "bf16": lambda: check_resume(f"{scratch}/bf16", (2, 2), [(2, 1)], "--bf16"),
    }
    for name, check in checks.items():
        if only and name not in only:
            continue
        check()
        if rank == 0:
            print(name, flush=True)


if __name__ == "__main__":
    fork_ranks(main)
