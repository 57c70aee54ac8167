"""Checkpoints over two ranks: CP 2, TP 2 and DP 2, the hybrid model and a dense one with tied embeddings.

Run by test_checkpointing.py with a scratch folder. Each check's name is printed as it passes.
"""

import os
import random
import time

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel

from longstraw.patches.checkpoint_writer import results_in_process
from longstraw.patches.device import cuda_means_cpu
from megatron.grpo.checkpointing import find_reference, load_checkpoint, load_weights, save_checkpoint, save_weights
from megatron.grpo.optimizer import gradients_are_finite, name_nonfinite_gradients, step_optimizer
from tests.ranks.training_state import TrainingState, assert_same, refused
from tests.support.ranks import fork_ranks

HYBRID = "--model-preset tiny-qwen3.6 --max-response-length 8 --num-layers 2 --linear-attention-freq 2"
DENSE = "--model-preset tiny-llama --max-response-length 8 --num-layers 2"


def save(state: TrainingState, iteration: int, **more):
    return save_checkpoint(
        state.args, iteration, state.model, state.optimizer, state.scheduler, state.groups, **more
    )


def load(state: TrainingState, **more):
    return load_checkpoint(state.args, state.model, state.optimizer, state.scheduler, state.groups, **more)


def draw_numbers(generator) -> list:
    """One draw from every random source."""
    with cuda_means_cpu(), tensor_parallel.get_cuda_rng_tracker().fork():
        tracked = torch.rand(3)
    return [random.random(), np.random.rand(), torch.rand(3).tolist(), tracked.tolist(),
            torch.rand(3, generator=generator).tolist()]


def check_resume_is_exact(folder: str, flags: str, tp: int, cp: int) -> TrainingState:
    """3 steps, save, 2 steps; then load into a run that began elsewhere, 2 steps: the same, bit for bit."""
    flags = f"{flags} --save {folder} --load {folder} --save-interval 3"
    first = TrainingState(flags, tp, cp, seed=1)
    assert load(first) is None
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    first.train(1, 3)
    draw_numbers(generator)
    save(first, 3, data_position={"epoch": 1, "position": 5}, extra={"best": 0.5}, generators={"own": generator})
    numbers = draw_numbers(generator)
    norms = first.train(4, 5)

    second = TrainingState(flags, tp, cp, seed=2)
    second.train(7, 8)
    other = torch.Generator().manual_seed(99)
    resumed = load(second, generators={"own": other})
    assert (resumed.iteration, resumed.data_position) == (3, {"epoch": 1, "position": 5})
    assert resumed.extra == {"best": 0.5} and resumed.random_states
    assert (found := draw_numbers(other)) == numbers, (found, numbers)
    assert second.scheduler.num_steps == 3
    assert second.train(4, 5) == norms
    assert_same(second.whole_weights(), first.whole_weights())
    assert_same(second.adam_state(), first.adam_state())
    return first


def check_other_topology(folder: str, flags: str, tp: int, cp: int, before: tuple[int, int]) -> None:
    """What was saved at one topology is there bit for bit at another, and two more steps agree to rounding."""
    reference = TrainingState(f"{flags} --load {folder}", *before, seed=3)
    load(reference, generators={"own": torch.Generator()})
    saved = reference.whole_weights()
    norms = reference.train(4, 5)
    final = reference.whole_weights()
    state = TrainingState(f"{flags} --load {folder}", tp, cp, seed=4)
    resumed = load(state)
    assert resumed.iteration == 3 and resumed.data_position["position"] == 5 and not resumed.random_states
    assert_same(state.whole_weights(), saved)
    assert all(abs(a - b) <= 1e-5 * b for a, b in zip(state.train(4, 5), norms)), "the gradients' norms differ"
    for name, weight in state.whole_weights().items():
        assert torch.allclose(weight, final[name], rtol=1e-4, atol=1e-6), name
    # and back again, through a checkpoint of this topology
    back = f"{folder}-back"
    state.args.save = back
    save(state, 5)
    again = TrainingState(f"{flags} --load {back}", *before, seed=5)
    load(again)
    assert_same(again.whole_weights(), state.whole_weights())


def check_refusals(folder: str) -> None:
    """A checkpoint that does not fit is refused in one sentence, and the model stays as it was."""
    def refuse(flags: str, *fragments: str) -> None:
        state = TrainingState(f"--load {folder} {flags}", cp=2, seed=6)
        before, moments = state.whole_weights(), state.adam_state()
        with refused(*fragments):
            load(state)
        assert_same(state.whole_weights(), before)
        assert_same(state.adam_state(), moments)

    refuse(f"{HYBRID} --ffn-hidden-size 384",
           "mlp.linear_fc1.weight is [512, 128] there and [768, 128] here", "more differ")
    refuse(f"{HYBRID} --num-layers 4", "decoder.layers.2.", "is missing there")
    refuse(DENSE, "another model", "missing here")
    refuse(f"{HYBRID} --vocab-size 120", "--vocab-size 128, not 120")
    refuse(f"{HYBRID} --bf16", "without --bf16", "--no-load-optim")
    refuse(f"{HYBRID} --ckpt-step 4", "--ckpt-step 4", "missing or incomplete")
    refuse(f"{HYBRID} --load {folder}-nowhere --exit-on-missing-checkpoint", "holds no checkpoint")
    refuse(f"{HYBRID} --load {folder}-nowhere --pretrained-checkpoint {folder}-neither", "holds no checkpoint")


def check_load_flags(folder: str) -> None:
    """--finetune, --no-load-optim, --no-load-rng, --pretrained-checkpoint, and weights saved alone."""
    def loaded(flags: str):
        state = TrainingState(f"{HYBRID} {flags}", cp=2, seed=7)
        return state, load(state, generators={"own": torch.Generator()})

    whole, everything = loaded(f"--load {folder}")
    weights = whole.whole_weights()
    for flags in (f"--load {folder} --finetune", f"--load {folder}-none --pretrained-checkpoint {folder}"):
        state, resumed = loaded(flags)
        assert_same(state.whole_weights(), weights)
        assert (resumed.iteration, resumed.data_position, state.scheduler.num_steps) == (0, None, 0)
        assert not resumed.random_states and all(not moment.any() for moment in state.adam_state())
    state, resumed = loaded(f"--load {folder} --no-load-optim")
    assert_same(state.whole_weights(), weights)
    assert resumed.iteration == 3 and state.scheduler.num_steps == 0 and resumed.random_states
    state, resumed = loaded(f"--load {folder} --no-load-rng")
    assert resumed.iteration == 3 and state.scheduler.num_steps == 3 and not resumed.random_states
    assert find_reference(state.args, None, None) is None
    assert find_reference(state.args, "there", resumed) == "there"
    with refused("--kl-coefficient", "--reference-checkpoint"):
        find_reference(state.args, None, resumed)

    state, resumed = loaded(f"--load {folder} --finetune --bf16")  # another precision: weights are rounded, no more
    rounded = {name: weight.bfloat16() for name, weight in weights.items()}
    assert_same(state.whole_weights(), rounded)
    state.train(1, 1)  # at the start of the warmup the rate is 0, so the optimizer's own weights show through
    assert_same(state.whole_weights(), rounded)

    path = save_weights(f"{folder}-weights", whole.model, whole.groups, vocab_size=128)
    assert path.name == "release"
    state, resumed = loaded(f"--load {folder}-weights")
    assert resumed.iteration == 0
    assert_same(state.whole_weights(), weights)
    other = TrainingState(HYBRID, tp=2, seed=8)
    load_weights(f"{folder}-weights", other.model, other.groups, vocab_size=128)
    assert_same(other.whole_weights(), weights)

    state.args.save, state.args.no_save_optim, state.args.no_save_rng = f"{folder}-bare", True, True
    save(state, 2)
    for flags, fragment in (("", "no optimizer state"), ("--no-load-optim", "no random states")):
        bare = TrainingState(f"{HYBRID} --load {folder}-bare {flags}", cp=2, seed=9)
        with refused(fragment):
            load(bare)


def check_converted(folder: str) -> None:
    """What the converter writes is what --load --finetune reads, and the converter reads what a run saves."""
    from megatron.grpo.conversion.megatron_checkpoint import load_model_weights, save_model_weights

    for name, flags in (("hybrid", HYBRID), ("dense", DENSE)):
        first = TrainingState(flags, tp=2, seed=1)
        with results_in_process():  # these ranks may not start processes
            save_model_weights(f"{folder}/converted-{name}", first.model, first.preset)
        second = TrainingState(f"{flags} --load {folder}/converted-{name} --finetune", cp=2, seed=2)
        assert load(second).iteration == 0
        assert_same(second.whole_weights(), first.whole_weights())
        second.train(1, 1)
        second.args.save = f"{folder}/trained-{name}"
        save(second, 1)
        third = TrainingState(flags, tp=2, seed=3)
        load_model_weights(second.args.save, third.model)
        assert_same(third.whole_weights(), second.whole_weights())


def check_before_the_first_step(folder: str, flags: str) -> None:
    """A checkpoint of step 0 resumes: Adam's state is there, and its count is 0."""
    first = TrainingState(f"{flags} --save {folder} --save-interval 1", cp=2, seed=1)
    save(first, 0)
    second = TrainingState(f"{flags} --load {folder}", cp=2, seed=2)
    load(second)
    assert first.train(1, 2) == second.train(1, 2)
    assert_same(second.whole_weights(), first.whole_weights())


def check_retention(folder: str) -> None:
    """--save-retain-interval keeps its multiples and the latest."""
    state = TrainingState(
        f"{DENSE} --save {folder} --save-interval 1 --save-retain-interval 2 --no-save-optim", cp=2)
    for step in range(1, 6):
        save(state, step)
    names = sorted(name for name in os.listdir(folder) if name.startswith("iter_"))
    assert names == ["iter_0000002", "iter_0000004", "iter_0000005"], names
    save(state, 5)  # the same step again, over what is there
    assert sorted(name for name in os.listdir(folder) if name.startswith("iter_")) == names


def check_gradients() -> None:
    """The norm is one whole norm at every topology, clipping uses it, and a NaN on one rank stops every rank."""
    wanted, updates = None, []
    for tp, cp in ((1, 2), (2, 1), (1, 1)):
        state = TrainingState(f"{HYBRID} --clip-grad 0.5 --lr-warmup-iters 0", tp, cp, seed=1)
        state.set_gradients(1)
        whole = state.gather({name: p.main_grad.clone() for name, p in state.model.named_parameters()})
        wanted = torch.cat([g.double().flatten() for g in whole.values()]).norm().item()
        before = {name: p.main_grad.clone() for name, p in state.model.named_parameters()}
        assert gradients_are_finite(state.ddp, state.groups)
        ok, norm = step_optimizer(state.optimizer, state.scheduler)
        assert ok and abs(norm - wanted) <= 1e-5 * wanted, (norm, wanted)
        for name, parameter in state.model.named_parameters():
            torch.testing.assert_close(parameter.main_grad, before[name] * (0.5 / wanted), rtol=1e-4, atol=1e-8)
        updates.append(norm)
    assert max(updates) - min(updates) <= 1e-5 * wanted

    state = TrainingState(f"{HYBRID} --clip-grad 0", tp=2, seed=1)
    weights, moments = state.whole_weights(), state.adam_state()
    for bad in (float("nan"), float("inf"), float("-inf")):
        state.set_gradients(1)
        name, parameter = list(state.model.named_parameters())[-1]
        if dist.get_rank() == 1:
            parameter.main_grad.view(-1)[-1] = bad
        assert not gradients_are_finite(state.ddp, state.groups)
        assert name_nonfinite_gradients(state.ddp, state.groups) == [name]
    state.set_gradients(1)
    for parameter in state.model.parameters():
        parameter.main_grad.fill_(1e30)  # finite, and its squares are not
    assert gradients_are_finite(state.ddp, state.groups)
    ok, norm = step_optimizer(state.optimizer, state.scheduler)
    assert not ok and norm == float("inf")
    assert_same(state.whole_weights(), weights)
    assert_same(state.adam_state(), moments)
    assert state.scheduler.num_steps == 0


def check_no_process_left() -> None:
    with open(f"/proc/self/task/{os.getpid()}/children") as children:
        assert children.read().split() == []


def main(rank: int, ranks: int, arguments: list[str]) -> None:
    start = time.monotonic()

    def passed(name: str) -> None:
        if rank == 0:
            print(f"passed: {name}, {time.monotonic() - start:.1f} s", flush=True)

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    folder = arguments[0]
    for name, flags, dtype in (("hybrid", HYBRID, ""), ("hybrid-bf16", HYBRID, "--bf16"), ("dense", DENSE, "")):
        path = f"{folder}/{name}"
        check_resume_is_exact(path, f"{flags} {dtype}", 1, 2)
        passed(f"resume, {name}, CP 2")
        if not dtype:
            check_other_topology(path, flags, 2, 1, before=(1, 2))
            passed(f"CP 2 -> TP 2 -> CP 2, {name}")
    check_other_topology(f"{folder}/hybrid", HYBRID, 1, 1, before=(1, 2))
    passed("CP 2 -> DP 2, hybrid")
    check_resume_is_exact(f"{folder}/tp", HYBRID, 2, 1)
    passed("resume, hybrid, TP 2")
    check_refusals(f"{folder}/hybrid")
    passed("refusals")
    check_load_flags(f"{folder}/hybrid")
    passed("load flags")
    check_converted(folder)
    passed("converted checkpoints, both ways")
    check_before_the_first_step(f"{folder}/zero", DENSE)
    check_before_the_first_step(f"{folder}/zero-bf16", f"{DENSE} --bf16")
    passed("step 0")
    check_retention(f"{folder}/retention")
    passed("retention")
    check_gradients()
    passed("gradients")
    check_no_process_left()
    passed("no process left")


if __name__ == "__main__":
    fork_ranks(main)
