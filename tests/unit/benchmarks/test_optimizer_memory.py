"""benchmarks/optimizer_memory.py: live storages, what updates say of themselves, and the arithmetic by shape agree."""

import json
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks.optimizer_memory import layout_of, measure, parse_arguments, run_apart  # noqa: E402
from benchmarks.optimizer_shapes import (  # noqa: E402
    Layout, MatrixShape, ModelShapes, count_adam, count_logra, count_lora, read_shapes,
)
from longstraw.memory_meter import StorageMeter  # noqa: E402
from longstraw.optim.projection import Projection  # noqa: E402
from longstraw.optim.sketch import open_sketch, sketched_linear  # noqa: E402
from tests.support.models import get_pair, one_rank  # noqa: E402
from tests.support.ranks import run_forked  # noqa: E402

SMALL = "--prompt-length 9 --response-length 2 --group-size 2 --chunk-size 8 --logra-rank 16 --lora-rank 16"


@cache
def figures_of(optimizer: str, flags: str) -> dict:
    one_rank()
    return measure(parse_arguments(f"{SMALL} {flags}".split()), optimizer)


@pytest.mark.parametrize("optimizer, flags", [
    ("adam", ""), ("adam", "--bf16"), ("lora", ""), ("logra", ""), ("logra", "--bf16"),
])
def test_live_storages_are_what_the_update_counts_and_what_shapes_say(optimizer, flags):
    figures, shapes = figures_of(optimizer, flags), read_shapes(get_pair("tiny-qwen3.6").model)
    assert 0 <= figures["unaccounted_bytes"] <= 16, figures  # Megatron's optimizers keep a flag
    assert figures["leaked_in_a_step"] == 0
    by_shape = {
        "adam": count_adam(shapes, Layout(), bf16=bool(flags)),
        "lora": count_lora(shapes, 16, bf16=bool(flags)),
        "logra": count_logra(shapes, Layout(), 16, bf16=bool(flags)),
    }[optimizer]
    step_counts = 4 * 200  # one number a parameter, of torch's Adam
    assert 0 <= figures["matrices_bytes"] - by_shape["matrices"] <= (0 if optimizer == "logra" else step_counts)
    assert 0 <= figures["rest_bytes"] - by_shape["rest"] <= step_counts
    assert figures["matrix_parameters"] == shapes.numel - shapes.rest and figures["rest_parameters"] == shapes.rest


def test_ten_times_fewer_bytes_on_sketched_weights():
    assert figures_of("adam", "")["matrices_bytes"] >= 10 * figures_of("logra", "")["matrices_bytes"]
    counted, drawn = figures_of("logra", "")["counted"], figures_of("logra", "")["projection_bytes"]
    # Adam has 12 bytes a parameter; LoGRA a sketch and a moment for each row, beside the words of A that are drawn now.
    assert drawn > 0
    assert 12 * figures_of("logra", "")["matrix_parameters"] >= 20 * (counted["gradients"] - drawn + counted["optimizer"])


def test_every_phase_has_its_peak():
    peaks = figures_of("logra", "")["phase_peak_bytes"]
    assert set(peaks) == {"accumulate", "reduce", "prepare", "probe", "apply"} and all(p >= 0 for p in peaks.values())
    assert peaks["probe"] > 0 and peaks["apply"] > 0
    assert set(figures_of("adam", "")["phase_peak_bytes"]) == {"accumulate", "commit"}


def test_the_accumulator_of_4096_by_4096_at_rank_64_is_one_mebibyte():
    """Not 64: and no tensor of the weight's size is made by a backward, whose peak is a few blocks."""
    weight = torch.empty(4096, 4096)  # its values do not matter, so its pages stay untouched
    sketch = open_sketch(weight, Projection(name="w", rank=64, columns=4096, seed=1, draw=0))
    assert sketch.sketch.nbytes == 2**20 and weight.nbytes == 64 * 2**20
    x = torch.ones(3, 4096)
    with StorageMeter() as meter:
        sketched_linear(x, weight, sketch).sum().backward()
    assert meter.peak_bytes < 16 * 2**20 and weight.grad is None and bool(sketch.sketch.any())


def test_shares_by_hand():
    """A matrix of 10 x 64 and an expert's of 6 x 64, which 4 and 2 ranks hold; R 2."""
    shapes = ModelShapes(rest=5, matrices=(
        MatrixShape(rows=10, columns=64, expert=False, called=True),
        MatrixShape(rows=6, columns=64, expert=True, called=False),
    ))
    layout = Layout(context_parallel=4, expert_parallel=2)
    assert layout.ranks == 4 and (layout.copies(False), layout.copies(True)) == (4, 2)
    assert count_adam(shapes, layout) == {"matrices": 16 * 1024, "rest": 80}
    assert count_adam(shapes, layout, shared_out=True) == {"matrices": 4 * 1024 + 3 * 640 + 6 * 384, "rest": 20 + 15}
    assert count_lora(shapes, 2)["matrices"] == 16 * 2 * 74  # the second is only read
    found = count_logra(shapes, layout, 2)
    assert (found["sketches"], found["row_moments"]) == (4 * 2 * 16, 4 * 16)
    assert found["masters"] == 2 * 64 * (3 + 3) and found["projections"] == 2 * 8 + 6 * 2048
    assert count_logra(shapes, layout, 2, masters="float32")["masters"] == 2 * found["masters"]


@pytest.mark.ranks
def test_the_report_has_a_large_model_by_its_published_sizes(tmp_path):
    """The whole command; matrices of qwen3.6-27b written down from its dimensions."""
    flags = f"{SMALL} --optimizers logra --shapes qwen3.6-27b --tensor-model-parallel-size 2 --context-parallel-size 4"
    script = ROOT / "benchmarks" / "optimizer_memory.py"
    run_forked(script, [*flags.split(), "--json", str(tmp_path / "r.json")], tmp_path)
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["measured"]["logra"]["unaccounted_bytes"] == 0 and report["ratios"] == {}
    found = report["by_shape"]["qwen3.6-27b"]
    delta_net = [(2 * 16 * 128 + 2 * 48 * 128 + 2 * 48, 5120, 2, 1), (5120, 48 * 128, 1, 2)]
    attention = [((2 * 24 + 2 * 4) * 256, 5120, 2, 1), (5120, 24 * 256, 1, 2)]
    mlp = [(2 * 17408, 5120, 2, 1), (5120, 17408, 1, 2)]
    whole = 48 * (delta_net + mlp) + 16 * (attention + mlp)
    own = [(rows // cut, columns // split) for rows, columns, cut, split in whole]
    assert found["matrices"] == len(own) == 256
    assert found["matrix_parameters"] == sum(rows * columns for rows, columns in own)
    sketched = found["bytes"]["logra, rank 256, masters remainder"]
    assert sketched["sketches"] == 4 * 256 * sum(rows for rows, _ in own)
    assert sketched["masters"] == 2 * sum(-(-rows // 4) * columns for rows, columns in own)
    assert found["bytes"]["adam"]["matrices"] == 16 * found["matrix_parameters"] > 6 * sketched["matrices"]


@pytest.mark.filterwarnings("ignore:This process")  # a fork of many threads is said to be one
def test_a_process_that_fails_is_an_error():
    assert run_apart(fail) == {"error": "ended with exit code 1; see standard error"}


def fail():
    sys.exit(1)


def test_layouts_are_the_published_ones_unless_flags_say_otherwise():
    assert layout_of(parse_arguments([]), "qwen3.6-27b") == Layout(context_parallel=8)
    assert layout_of(parse_arguments([]), "glm-5.2") == Layout(context_parallel=32, expert_parallel=32)
    args = parse_arguments("--shapes qwen3.6-27b --tensor-model-parallel-size 2 --context-parallel-size 4".split())
    assert layout_of(args, "qwen3.6-27b") == Layout(tensor_parallel=2, context_parallel=4)


@pytest.mark.parametrize("bad, sentence", [
    ("--logra-rank 0", "--logra-rank is at least 1"),
    ("--model-preset no-such-model", "--model-preset no-such-model is not known"),
    ("--shapes qwen3.6-27b --tensor-model-parallel-size 8", "key/value heads"),
    ("--group-size 1", "--group-size and --prompt-length are at least 2"),
    ("--json .", "--json . is a folder"),
])
def test_bad_flags_get_a_sentence(bad, sentence, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(bad.split())
    assert sentence in capsys.readouterr().err
