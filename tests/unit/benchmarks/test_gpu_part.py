"""benchmarks/gpu.py on a CPU at tiny sizes: kernels with their rooflines."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import measure_gpu  # noqa: E402
from benchmarks.gpu_kernels import KernelSizes, find_hardware, judge, measure_kernels  # noqa: E402
from longstraw.dry_run.hardware import HARDWARE  # noqa: E402

TINY = KernelSizes(
    queries=16, keys=(32,), heads=4, key_heads=2, head_dim=8, delta_tokens=64, delta_heads=2, delta_dim=8, repeat=1,
    dtype=torch.float32,
)  # fmt: skip


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
