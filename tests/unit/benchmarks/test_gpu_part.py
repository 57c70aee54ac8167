"""benchmarks/gpu.py on a CPU at tiny sizes: kernels with their rooflines, steps until one is too long, the dry run beside them."""

import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import GpuPlan, measure_gpu, run_lengths  # noqa: E402
from benchmarks.gpu_kernels import KernelSizes, find_hardware, judge, measure_kernels  # noqa: E402
from benchmarks.results import ResultStore  # noqa: E402
from longstraw.dry_run.hardware import HARDWARE  # noqa: E402

TINY = KernelSizes(
    queries=16, keys=(32,), heads=4, key_heads=2, head_dim=8, delta_tokens=64, delta_heads=2, delta_dim=8, repeat=1,
    dtype=torch.float32,
)  # fmt: skip
FLAGS = "--model-preset tiny-qwen3.6 --group-size 2 --max-response-length 4 --prompt-chunk-size 32 --lr 1e-6"


def test_kernels_have_seconds_rates_and_the_roofline_of_a_known_device():
    found = measure_kernels(TINY, "cpu", HARDWARE["H100"])
    assert set(found) == {"attention_16x32_forward", "attention_16x32_backward", "delta_rule_torch_64_forward",
                          "delta_rule_torch_64_forward_backward"}  # fmt: skip
    for figures in found.values():
        assert all(value > 0 for value in figures.values())
        assert figures["roofline_fraction"] == figures["roofline_seconds"] / figures["seconds"]


def test_the_roofline_is_the_longer_of_operations_and_bytes():
    hardware = HARDWARE["H100"]
    assert judge(1.0, hardware.flops_16 / 2, 1.0, hardware)["roofline_fraction"] == pytest.approx(0.5)
    assert judge(1.0, 1.0, hardware.memory_bandwidth / 4, hardware)["roofline_fraction"] == pytest.approx(0.25)
    assert "roofline_seconds" not in judge(1.0, 1.0, 1.0, None)


@pytest.mark.parametrize("name, key", [("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H20-3e", "H20"), ("NVIDIA H200", "H200"),
                                       ("NVIDIA B200", "B200")])  # fmt: skip
def test_a_device_is_found_by_its_name(name, key):
    assert find_hardware(name) is HARDWARE[key]


def test_an_unknown_device_has_no_roofline():
    assert find_hardware("cpu") is None and find_hardware("NVIDIA GeForce") is None


def test_without_a_gpu_it_says_so(tmp_path):
    with pytest.raises(SystemExit, match="--gpu needs a GPU that PyTorch sees"):
        measure_gpu(tmp_path)


@pytest.mark.timeout(900)  # two programs that import Megatron, one after the other
@pytest.mark.ranks(seconds=60)
def test_the_whole_part_at_tiny_sizes(tmp_path):
    """Steps in a process of their own, and the dry run of the longest, on the CPU's kernels, within a few percent of it."""
    plan = GpuPlan(kernels=TINY, flags=FLAGS, response_length=4, lengths=(96, 192), dry_run_flags=("--machine", "cpu"))
    measure_gpu(tmp_path, plan)
    found = {key: record["figures"] for key, record in ResultStore(tmp_path).read_all().items()}
    assert {"gpu/step_96", "gpu/step_192", "gpu/longest"} <= set(found)
    longest = found["gpu/longest"]
    assert longest["prompt_length"] == 192 and longest["peak_bytes"] > found["gpu/step_96"]["peak_bytes"]
    assert longest["measured_over_predicted"] == pytest.approx(1, abs=0.25)


@pytest.mark.ranks(seconds=15)
def test_a_step_that_fails_and_one_without_time_are_results():
    plan = GpuPlan(flags=FLAGS + " --no-such-flag", lengths=(96,))
    assert run_lengths(plan, (96,), time.monotonic() + 120) == [{"prompt_length": 96, "error": "the process ended with 1"}]
    assert run_lengths(plan, (96,), time.monotonic() + 0.2) == [{"prompt_length": 96, "error": "time was up"}]
