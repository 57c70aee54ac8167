"""A dry run's receipt beside that of the same step, measured or of a training run: tokens, collectives, memory, state."""

from pathlib import Path

import pytest

from longstraw.receipts.compare import find_differences
from longstraw.receipts.receipt import Receipt, read_receipt
from tests.support.ranks import REPOSITORY, run_forked, run_on_ranks
from tools.compare_receipts import main as compare_receipts

pytestmark = [pytest.mark.ranks(seconds=60), pytest.mark.timeout(600)]

HERE = Path(__file__).parent
HYBRID = "--model-preset tiny-qwen3.6 --num-layers 2 --linear-attention-freq 2 --context-parallel-size 2 --group-size 4".split()


def foresee(path: Path, scratch: Path, flags: list) -> Receipt:
    run_forked(HERE / "dry_run_ranks.py", ["dry", scratch / "report.json", *flags, "--receipt", path], scratch)
    return read_receipt(path)


def uses(receipt: Receipt) -> dict:
    return {(use.group, use.operation): (use.calls, use.bytes) for use in receipt.collectives}


def states(receipt: Receipt) -> dict:
    return {(item.kind, item.residency): (item.layers, item.rows, item.bytes) for item in receipt.state if item.rank == 0}


def test_a_measured_step_is_as_foreseen(tmp_path, capsys):
    flags = [*HYBRID, *"--prompt-length 150 --response-length 20 --prompt-chunk-size 32 --response-block-size 8 "
             "--page-residency host --adjoint-residency host".split()]
    measured, foreseen = tmp_path / "measured.json", tmp_path / "foreseen.json"
    ranks = ["measure", 2, tmp_path / "rendezvous", tmp_path / "report.json"]
    run_forked(HERE / "dry_run_ranks.py", [*ranks, *flags, "--receipt", measured], tmp_path)
    dry, real = foresee(foreseen, tmp_path, flags), read_receipt(measured)
    assert (real.source, dry.source, real.topology.backend, dry.topology.backend) == ("run", "dry_run", "gloo", "fake")
    assert real.tokens == dry.tokens and real.tokens.prompt_tokens == 150 and real.tokens.response_tokens == 80
    assert uses(real) == uses(dry) and uses(real)["cp", "all_to_all"][0] > 100
    assert states(real) == states(dry) and ("kv_pages", "host") in states(real)
    (held,), own = dry.memory, real.memory[0]
    assert held.rank == 0 and len(real.memory) == 2 and held.counted == own.counted == "tensors"
    for name in ("peak_bytes", "host_bytes"):
        assert getattr(held, name) == pytest.approx(getattr(own, name), rel=0.02) and getattr(own, name) > 0
    for name in ("categories", "host_categories", "phases"):
        found, expected = getattr(held, name), getattr(own, name)
        assert found.keys() == expected.keys() and expected, name
        largest = max(expected.values())
        assert all(abs(found[key] - expected[key]) <= 0.02 * largest for key in expected if key != "build"), (name, found, expected)
    assert [sentence.split(" differ")[0] for sentence in find_differences([real, dry])] == ["sources"]
    assert all(check.passed for check in real.checks) and real.metrics["ratio_max"] == 1.0
    assert compare_receipts([str(measured), str(foreseen), "--output", str(tmp_path / "both.png")]) == 0
    assert capsys.readouterr().out.startswith("sources differ: measured | foreseen on fake tensors")


def test_a_training_step_is_as_foreseen(tmp_path):
    sweep = ["--prompt-chunk-size", "20"]
    run_forked(
        REPOSITORY / "examples" / "recall" / "make_data.py",
        ["--output", tmp_path / "data", "--prompt-tokens", 47, "--num-facts", 4, "--num-train", 16, "--num-eval", 3], tmp_path,
    )
    run_on_ranks(HERE / "receipt_ranks.py", 2, tmp_path, [str(tmp_path), *sweep])
    real = read_receipt(tmp_path / "run" / "receipts" / "step-000002.json")
    lengths = ["--prompt-length", 47, "--response-length", 1]
    dry = foresee(tmp_path / "foreseen.json", tmp_path, [*HYBRID, *sweep, *lengths])
    assert real.tokens == dry.tokens and states(real) == states(dry) and real.phase_tokens == dry.phase_tokens
    assert real.memory[0].phases.keys() | {"build"} == dry.memory[0].phases.keys()
    for name in ("weights", "gradients", "optimizer"):
        assert dry.memory[0].categories[name] == pytest.approx(real.memory[0].categories[name], rel=0.02)
    measured, foreseen = uses(real), uses(dry)
    assert measured.keys() == foreseen.keys()
    for key, (calls, size) in foreseen.items():
        # a run also agrees on whether to stop: some numbers, 8 bytes each
        spare = 20 if key[1] == "all_reduce" else 0
        assert 0 <= measured[key][0] - calls <= spare and 0 <= measured[key][1] - size <= 8 * spare, (key, measured, foreseen)
