"""The ranks of `test_logra_ranks.py`: sketches over parallel ranks against dense gradients, and runs of the program.

    logra_ranks.py 2 RENDEZVOUS FOLDER
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from longstraw.optim.projection import project_columns
from longstraw.patches.float64 import lift_float64
from longstraw.patches.process_groups import initialize_groups
from longstraw.rollout.weight_delta import apply_delta, checksum_weights, read_manifest
from longstraw.transaction.commit import StepRejected
from megatron.grpo.arguments import parse_arguments
from megatron.grpo.logra import build_logra, choose_trained
from megatron.grpo.presets import get_preset
from megatron.grpo.sharding import shard_parameter
from tests.ranks.running_mean_checks import check_running_mean
from tests.ranks.training_ranks import HYBRID, Runner, without_measured
from tests.support import models
from tests.support.dense import dense_gradients
from tests.support.ranks import fork_ranks

LOGRA = f"{HYBRID} --optimizer logra --logra-rank 4 --kl-budget 1e-3 --kl-probe-responses 4"


def check_sketches(name: str, *, tp: int = 1, cp: int = 1, ep: int = 1, sequence_parallel: bool = False, **changes) -> None:
    """S of every matrix equals the dense gradient times A^T; a step's norms are the whole model's."""
    parallel_state.destroy_model_parallel()
    groups = initialize_groups(tensor_parallel=tp, context_parallel=cp, expert_parallel=ep)
    preset = replace(get_preset(name), **changes)
    with lift_float64():
        pair = models.build_pair(preset, torch.float64, groups, sequence_parallel=sequence_parallel)
        for parameter in pair.plain.parameters():
            dist.broadcast(parameter.data, 0)
        models.copy_weights(pair, groups)
        args, config = parse_arguments(
            f"--model-preset {name} --prompt-data p --tokenizer-path t --train-iters 1 --optimizer logra --logra-rank 4 "
            f"--kl-probe finite-difference --context-parallel-size {cp} --tensor-model-parallel-size {tp} "
            f"--expert-model-parallel-size {ep}".split()
        )
        choose_trained(args, config.logra, pair.model)
        logra = build_logra(args, config.logra, _NoBuffers(pair.model), groups).logra
        group = models.draw_group(23, (5, 2), preset.vocab_size)
        engine = pair.engine()
        logra.restart(0)
        engine.replay(group.tree())
        engine.finish_phase()
        logra.reduce()
        _, gradients = dense_gradients(pair.plain, group.sequences(), vocab_size=pair.vocab_size)
    assert groups.dp.size() == 1
    worst = total = kept = 0.0
    for weight in logra.weights:
        whole, tp_rank = gradients[weight.name], groups.tp.rank()
        wanted = whole @ project_columns(weight.projection, 0, weight.placement.columns, dtype=torch.float64).t()
        if weight.placement.split == "rows":
            wanted = shard_parameter(weight.name, wanted, preset, tp_rank, tp)
        if wanted.norm():
            worst = max(worst, ((weight.sketch.sketch - wanted).norm() / wanted.norm()).item())
    assert worst <= 1e-12, (name, worst)
    direction = logra.prepare()
    names = {m for m in gradients if m.endswith(".weight") and m in _projection_names(logra, groups)}
    for found in names:
        whole = gradients[found]
        kept += (whole @ project_columns(_projection_of(logra, found, whole), 0, whole.shape[1], dtype=torch.float64).t()).square().sum()
        total += dict(pair.plain.named_parameters())[found].square().sum()
    assert abs(direction.gradient_norm / float(kept) ** 0.5 - 1) <= 1e-10
    assert abs(direction.weight_norm / float(total) ** 0.5 - 1) <= 1e-10
    alone = torch.tensor([direction.eta, direction.direction_norm], dtype=torch.float64)
    first = alone.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, alone), "ranks disagree"


class _NoBuffers:
    """What `build_logra` reads of DDP: every weight is frozen, so DDP would hold nothing."""

    def __init__(self, module):
        self.module = module


def _projection_names(logra, groups) -> set[str]:
    """Names of the matrices of all ranks."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [weight.name for weight in logra.weights])
    return set().union(*gathered)


def _projection_of(logra, name: str, whole: torch.Tensor):
    return replace(logra.weights[0].projection, name=name, columns=whole.shape[1])


def check_runs(runner: Runner) -> None:
    """CP 2; gone on with bit for bit, and at TP 2 to rounding."""
    save = f"--save {runner.folder}/saved --save-interval 2"
    seen = {}
    records = runner.run("whole", f"{LOGRA} {save}", prepare=lambda trainer: seen.update(ddp=trainer.update.ddp))
    assert not seen["ddp"].buffers and not any(hasattr(p, "main_grad") for p in seen["ddp"].module.parameters())
    moved = [record for record in records if record["grad_norm"] > 0]
    assert len(records) == 3 and moved, records
    for record in moved:
        assert record["kl_predicted"] <= record["kl_budget"] * (1 + 1e-9) and record["step_refused"] == 0
        assert abs(record["kappa"] - 1) < 0.2, record
    if runner.rank == 0:
        held = runner.receipt("whole")["memory"][0]["categories"]
        assert 0 < 4 * held["gradients"] < held["weights"], held
        update = runner.receipt("whole")["update"]
        assert (update["optimizer"], update["logra_rank"], update["kl_probe_scope"]) == ("logra", 4, "response")
    load = f"{LOGRA} --load {runner.folder}/saved --ckpt-step 2"
    again = runner.run("again", load)
    assert without_measured(again) == without_measured(records[2:]), (again, records[2:])
    assert runner.receipt("again")["model"]["final_weights"] == runner.receipt("whole")["model"]["final_weights"]
    other = runner.run("tp2", f"{load} --context-parallel-size 1 --tensor-model-parallel-size 2 --sequence-parallel")
    for key in ("grad_norm", "update_ratio", "kl_rate", "alpha", "kl_measured"):
        assert abs(other[0][key] - records[2][key]) <= 2e-3 * abs(records[2][key]) + 1e-9, (key, other[0], records[2])
    refuse(runner, "rank", f"{load} --logra-rank 8", "with --logra-rank 4 and this run is with --logra-rank 8")
    refuse(runner, "above", f"{LOGRA} --logra-rank 1000", "so a sketch would be no saving")
    refuse(runner, "adam", f"{HYBRID} --load {runner.folder}/saved", "with --optimizer logra and this run is with --optimizer adam")


def check_deltas(runner: Runner) -> None:
    """The files of two steps, applied to a copy of the weights from before, give the trainer's bits, put together over TP."""
    deltas, flags = runner.folder / "deltas", "--tensor-model-parallel-size 2 --context-parallel-size 1 --train-iters 2"
    run_with_deltas(runner, "delta-tp2", f"{LOGRA} {flags} --kl-probe finite-difference", deltas)
    refuse(runner, "mixed", f"{LOGRA} --logra-delta-dir {deltas}", "holds the updates of another run")
    refuse(runner, "nowhere", f"{LOGRA} --logra-delta-dir /proc/nowhere/deltas", "--logra-delta-dir /proc/nowhere/deltas cannot be made")


def run_with_deltas(runner: Runner, name: str, flags: str, deltas: Path) -> None:
    """A run of two steps whose files lead from its first weights to its last."""
    seen = {}

    def remember(trainer):
        seen["before"] = _whole_weights(trainer.update.deltas.writer)

    records = runner.run(name, f"{flags} --logra-delta-dir {deltas}", prepare=remember)
    assert all(record["delta_bytes"] > 0 for record in records)
    if runner.rank:
        return
    copies = seen["before"]
    for number in (1, 2):
        apply_delta(deltas / f"step_{number:07d}.safetensors", copies)
    assert read_manifest(deltas / "step_0000002.safetensors").result == checksum_weights(copies.items())
    try:
        apply_delta(deltas / "step_0000002.safetensors", copies)
    except ValueError as error:
        assert "they hold it already" in str(error)
    else:
        raise AssertionError("a delta was applied twice")


def _whole_weights(writer) -> dict[str, torch.Tensor]:
    """float32 copies of the matrices, whole."""
    return {
        name: tensor.float().clone()
        for matrix, weight in writer.pairs
        for name, tensor in writer._whole(matrix, weight.weight.data, rows_only=False).items()
    }


def check_masters(runner: Runner) -> None:
    """bfloat16 over 2 replicas: float32 masters and remainders, on device and host, end at the same bits."""
    flags = f"{LOGRA} --bf16 --context-parallel-size 1 --prompts-per-step 2 --kl-probe finite-difference --train-iters 2"
    ends = []
    for name, masters in (("remainder", ""), ("float32", "--logra-masters float32 --logra-master-residency host")):
        run_with_deltas(runner, name, f"{flags} {masters}", runner.folder / f"{name}-deltas")
        ends.append(runner.receipt(name)["model"])
    assert ends[0] == ends[1] and ends[0]["initial_weights"] != ends[0]["final_weights"]


def check_axes(runner: Runner) -> None:
    """Dense directions, and the other two step sizes; the rest of the weights by Adam beside it."""
    common = f"{HYBRID} --optimizer logra --train-iters 1 --prompts-per-step 4"
    lines = {
        "dense-adam": "--update-direction dense --update-rule adam --kl-budget 2e-5",
        "ratio": "--logra-rank 4 --update-step-size update-ratio --logra-train-rest",
        "rate": "--update-direction dense --update-rule sgd --update-step-size learning-rate",
    }
    for name, flags in lines.items():
        records = runner.run(name, f"{common} {flags}")
        moved = [record for record in records if record["grad_norm"] > 0]
        assert moved, (name, records)
        if name == "dense-adam":
            assert all(abs(record["kappa"] - 1) < 0.2 for record in moved), (name, moved)
        if name == "ratio":
            assert all(abs(record["update_ratio"] / 6e-5 - 1) < 1e-6 for record in moved), moved
            assert all(record["rest_grad_norm"] > 0 for record in moved)


def check_refused_steps(runner: Runner) -> None:
    """A prediction that is no number: the step is left out and the run goes on, or ends, as asked; nothing has moved."""

    def break_the_probe(trainer):
        trainer.update.probe.measure_kl = lambda *_: float("nan")

    flags = f"{LOGRA} --kl-probe finite-difference --train-iters 2"
    records = runner.run("refused", flags, prepare=break_the_probe)
    assert [record["step_refused"] for record in records] == [1, 1], records
    model = runner.receipt("refused")["model"]
    assert model["initial_weights"] == model["final_weights"]
    refuse(runner, "ended", f"{flags} --kl-refused-step stop", "the KL of a probe step is nan", StepRejected, break_the_probe)


def check_steps_too_long(runner: Runner) -> None:
    """A step longer than the weights themselves is left out."""
    flags = f"{HYBRID} --optimizer logra --logra-rank 4 --update-step-size learning-rate --lr 1e9 --clip-grad 0"
    records = runner.run("too-long", flags)
    assert [record["step_refused"] for record in records] == [1] * len(records), records


def check_no_gradient(runner: Runner) -> None:
    """Without a gradient there is no direction: the step has no length, and no weight moves."""
    records = runner.run("uniform", f"{LOGRA} --reward tests/ranks/sample_reward.py:the_same")
    for record in records:
        assert (record["alpha"], record["kl_predicted"], record["update_ratio"]) == (0.0, 0.0, 0.0), record
        assert record["grad_norm"] == 0.0 and "kappa" not in record, record
    model = runner.receipt("uniform")["model"]
    assert model["initial_weights"] == model["final_weights"]


def check_nan(runner: Runner) -> None:
    """A NaN in a sketch of one rank: rejected on every rank by the matrix's name."""

    def poison(trainer):
        if dist.get_rank() == 1:
            sketch, original = trainer.update.logra.weights[1].sketch, trainer.update.logra.reduce

            def reduce():
                sketch.sketch[0, 0] = float("nan")
                original()

            trainer.update.logra.reduce = reduce

    refuse(runner, "nan", LOGRA, "is not finite", StepRejected, poison)


def refuse(runner: Runner, name: str, flags: str, sentence: str, kind=ValueError, prepare=None) -> None:
    """The run ends with the sentence."""
    try:
        runner.run(name, flags, prepare=prepare)
    except kind as error:
        assert sentence in str(error), error
    else:
        raise AssertionError(f"{name} was not refused")


def main(rank: int, ranks: int, arguments: list[str]) -> None:
    folder, *only = arguments
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}  # as torchrun says it; the flags are checked against it
    hybrid = dict(num_layers=2, linear_attention_freq=2)
    sketches = {
        "cp2": lambda: check_sketches("tiny-qwen3.6", cp=2, **hybrid),
        "tp2": lambda: check_sketches("tiny-qwen3.6", tp=2, **hybrid),
        "tp2 sp": lambda: check_sketches("tiny-qwen3.6", tp=2, sequence_parallel=True, **hybrid),
        "cp2 ep2": lambda: check_sketches("tiny-glm5.2", cp=2, ep=2, num_layers=2, moe_layer_freq=(0, 1)),
    }
    for name, check in sketches.items():
        if not only or name in only:
            check()
            print(name, flush=True) if rank == 0 else None
    parallel_state.destroy_model_parallel()  # each run of the program makes its own
    runner = Runner(rank, ranks, Path(folder), "")
    for check in (
        check_runs, check_masters, check_deltas, check_running_mean, check_axes, check_refused_steps, check_no_gradient,
        check_steps_too_long, check_nan,
    ):
        if not only or check.__name__ in only:
            check(runner)
            print(check.__name__, flush=True) if rank == 0 else None
    runner.end()


if __name__ == "__main__":
    fork_ranks(main)
