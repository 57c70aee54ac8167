"""Low-rank pairs over two ranks: gradients, starts, checkpoints at other sizes, and whole runs.

Run by test_lora.py with a scratch folder that holds the runs' data. Each check's name is printed as it passes.
"""

import os
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from longstraw.patches.finalize_model_grads import finalize_gradients, wrap_for_gradients
from longstraw.patches.float64 import lift_float64
from longstraw.patches.lora import add_pairs, find_pairs, is_pair
from megatron.grpo.checkpointing import load_checkpoint, load_weights, save_checkpoint, save_weights
from megatron.grpo.presets import get_preset
from megatron.grpo.sharding import gather_gradients
from tests.ranks.training_ranks import Runner
from tests.ranks.training_state import TrainingState, assert_same, refused, switch_topology
from tests.support import models
from tests.support.dense import compare_gradients, dense_gradients
from tests.support.pairs import chain_rule, draw_pairs
from tests.support.ranks import fork_ranks

RANK, ALPHA = 3, 7.0
HYBRID = "--model-preset tiny-qwen3.6 --max-response-length 8 --num-layers 2 --linear-attention-freq 2"
EXPERTS = "--model-preset tiny-qwen3-moe --max-response-length 8 --num-layers 2"
PAIRS = "--lora-rank 4 --lora-alpha 8"


def check_gradients(preset, tp: int = 1, cp: int = 1, ep: int = 1, sequence_parallel: bool = False) -> None:
    """The whole gradient of A and B, through DDP and finalization, against the chain rule from a dense pass."""
    groups = switch_topology(tp, cp, ep)
    with lift_float64():
        pair = models.build_pair(preset, torch.float64, groups, sequence_parallel=sequence_parallel)
        for parameter in pair.plain.parameters():  # Megatron draws by tensor-parallel rank
            dist.broadcast(parameter.data, 0)
        models.copy_weights(pair, groups)
        add_pairs(pair.model, RANK, ALPHA)
        ddp = wrap_for_gradients(pair.model, groups)
        engine, group = pair.engine(), models.draw_group(43, (5, 17, 1), preset.vocab_size)
        ddp.zero_grad_buffer()
        names = [name for name in gather_gradients(pair.model, preset, groups) if is_pair(name)]
        whole = draw_pairs(pair, groups, names)
        if groups.dp.rank() == 0:
            with ddp.no_sync():
                engine.replay(group.tree())
        engine.finish_phase()
        finalize_gradients(ddp, engine.adapters, groups)
        _, dense = dense_gradients(pair.plain, group.sequences(), vocab_size=preset.vocab_size)
    found = gather_gradients(pair.model, preset, groups)
    total, single = compare_gradients(found, chain_rule(dense, whole, ALPHA / RANK))
    assert total <= 1e-12 and max(single.values()) <= 1e-11, (total, max(single, key=single.get), max(single.values()))
    if dist.get_rank() == 0:
        print(f"relative error {total:.2e}")


def check_starts(flags: str, sizes: list[tuple[int, int, int]]) -> None:
    """The pairs begin alike at every size."""
    wanted = None
    for tp, cp, ep in sizes:
        found = {n: w for n, w in TrainingState(flags, tp, cp, ep=ep).whole_weights().items() if is_pair(n)}
        wanted = wanted or found
        assert found and all(w.any() == n.endswith("lora_a") for n, w in found.items())
        assert_same(found, wanted)


def load(state: TrainingState):
    return load_checkpoint(state.args, state.model, state.optimizer, state.scheduler, state.groups)


def save(state: TrainingState, iteration: int) -> None:
    save_checkpoint(state.args, iteration, state.model, state.optimizer, state.scheduler, state.groups)


def check_resume(folder: str, flags: str, saved: tuple[int, int, int], others: list[tuple[int, int, int]]) -> None:
    """3 steps, save, 2 steps; loaded at the same size, bit for bit, at others to rounding; frozen weights stay."""
    flags = f"{flags} {PAIRS} --save {folder} --load {folder} --save-interval 3"
    tp, cp, ep = saved
    first = TrainingState(flags, tp, cp, seed=1, ep=ep)
    begun = first.whole_weights()
    assert load(first) is None
    first.train(1, 3)
    save(first, 3)
    weights, moments = first.whole_weights(), first.adam_state()
    assert all(torch.equal(w, begun[n]) != is_pair(n) for n, w in weights.items())
    norms, final = first.train(4, 5), first.whole_weights()
    for tp, cp, ep in [saved, *others]:
        state = TrainingState(flags, tp, cp, seed=2, ep=ep)
        state.train(7, 8)
        assert load(state).iteration == 3
        assert_same(state.whole_weights(), weights)
        if (tp, cp, ep) == saved:
            assert_same(state.adam_state(), moments)
            assert state.train(4, 5) == norms
            assert_same(state.whole_weights(), final)
        else:
            assert all(abs(a - b) <= 1e-5 * b for a, b in zip(state.train(4, 5), norms)), "the gradients' norms differ"
            for name, weight in state.whole_weights().items():
                assert torch.allclose(weight, final[name], rtol=1e-4, atol=1e-6), name


def check_checkpoints_without_pairs(folder: str) -> None:
    """A base model's checkpoint fits, and pairs add nothing then; what does not fit is refused."""
    base = TrainingState(HYBRID, cp=2, seed=1)
    save_weights(f"{folder}/base", base.model, base.groups, vocab_size=128)
    frozen = base.whole_weights()
    state = TrainingState(f"{HYBRID} {PAIRS} --pretrained-checkpoint {folder}/base", tp=2, seed=2)
    drawn = {n: w for n, w in state.whole_weights().items() if n.endswith("lora_a")}
    assert load(state).iteration == 0
    found = state.whole_weights()
    assert_same({n: w for n, w in found.items() if not is_pair(n)}, frozen)
    assert_same({n: w for n, w in found.items() if n.endswith("lora_a")}, drawn)
    state.train(1, 3)
    load_weights(f"{folder}/base", state.model, state.groups, vocab_size=128)  # as the reference of a resumed run
    assert all(not pair.b.any() for pair in find_pairs(state.model))

    base.args.save = f"{folder}/trained"
    base.train(1, 1)
    save(base, 1)
    for flags, fragments in (
        (f"{PAIRS} --load {folder}/trained", ("was trained without --lora-rank", "--pretrained-checkpoint")),
        (f"--load {folder}/resume", ("--lora-rank 4 --lora-alpha 8", "not --lora-rank 0", "--megatron-to-hf")),
        (f"--load {folder}/resume --finetune", ("--lora-rank 4 --lora-alpha 8", "not --lora-rank 0")),
        (f"--load {folder}/resume --lora-rank 4", ("--lora-alpha 8", "not --lora-rank 4 --lora-alpha 32")),
        (f"--load {folder}/resume --lora-rank 5 --lora-alpha 8", ("not --lora-rank 5 --lora-alpha 8",)),
    ):
        state = TrainingState(f"{HYBRID} {flags}", cp=2, seed=3)
        before = state.whole_weights()
        with refused(*fragments):
            load(state)
        assert_same(state.whole_weights(), before)


def check_runs(runner: Runner) -> None:
    """A run of the program with a reference policy: the KL begins at 0, and a resumed run is the whole one."""
    runner.run("base", f"--train-iters 1 --save {runner.folder}/base-run")
    flags = f"{PAIRS} --kl-coefficient 0.1 --pretrained-checkpoint {runner.folder}/base-run --train-iters 3 --lr 1e-2"
    whole = runner.run("whole", flags)
    assert [record["step"] for record in whole] == [1, 2, 3] and whole[0]["kl"] == 0.0, whole
    assert any(record["kl"] > 0 for record in whole[1:]) and any(record["grad_norm"] > 0 for record in whole), whole
    cut = f"{flags} --save {runner.folder}/cut --load {runner.folder}/cut"
    runner.run("first", f"{cut} --exit-interval 1")
    rest = runner.run("rest", cut)
    names = whole[1].keys() - {"eval_reward_mean", "eval_reward_mean_before", "seconds", "peak_bytes"}
    assert [{n: r[n] for n in names} for r in rest] == [{n: r[n] for n in names} for r in whole[1:]]
    if runner.rank == 0:
        memory = runner.receipt("whole")["memory"][0]["categories"]
        assert memory["gradients"] < 0.2 * memory["weights"], memory


def main(rank, ranks, arguments):
    folder, *only = arguments
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    hybrid = replace(get_preset("tiny-qwen3.6"), num_layers=2, linear_attention_freq=2)
    experts = replace(get_preset("tiny-qwen3-moe"), num_layers=2)
    checks = {
        "gradients, TP 2": lambda: check_gradients(hybrid, tp=2),
        "gradients, TP 2 with sequence parallelism": lambda: check_gradients(hybrid, tp=2, sequence_parallel=True),
        "gradients, CP 2": lambda: check_gradients(hybrid, cp=2),
        "gradients, CP 2 and EP 2": lambda: check_gradients(experts, cp=2, ep=2),
        "starts": lambda: check_starts(f"{HYBRID} {PAIRS}", [(1, 2, 1), (2, 1, 1)]),
        "starts of experts": lambda: check_starts(f"{EXPERTS} {PAIRS}", [(1, 2, 1), (1, 2, 2)]),
        "resume": lambda: check_resume(f"{folder}/resume", HYBRID, (1, 2, 1), [(2, 1, 1)]),
        "resume, TP 2": lambda: check_resume(f"{folder}/resume-tp", HYBRID, (2, 1, 1), [(1, 1, 1)]),
        "resume, bf16": lambda: check_resume(f"{folder}/resume-bf16", f"{HYBRID} --bf16", (1, 2, 1), []),
        "resume, EP 2": lambda: check_resume(f"{folder}/resume-ep", EXPERTS, (1, 2, 2), [(1, 2, 1)]),
        "checkpoints without pairs": lambda: check_checkpoints_without_pairs(folder),
    }
    for name, check in checks.items():
        if only and name not in only:
            continue
        check()
        if rank == 0:
            print(f"passed: {name}", flush=True)
    if not only or "runs" in only:
        parallel_state.destroy_model_parallel()
        runner = Runner(rank, ranks, Path(folder))
        check_runs(runner)
        runner.end()
        if rank == 0:
            print("passed: runs", flush=True)


if __name__ == "__main__":
    fork_ranks(main)
