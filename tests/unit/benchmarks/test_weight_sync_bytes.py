"""Bytes by shape: the matrices that are counted are those that updates move, and the sizes those of the files."""

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.weight_sync import Writer, count_bytes, is_projection, parse_arguments
from longstraw.patches.projections import find_projections
from longstraw.rollout.host_copy import HostCopy
from longstraw.rollout.weight_folder import DELTA_FILE, plan_syncs, read_manifest, tensor_files, version_folder
from megatron.grpo.conversion.build import build_blank_model, start_groups
from megatron.grpo.presets import get_preset
from tests.support.models import one_rank


@pytest.fixture(scope="module")
def groups():
    one_rank()  # other tests of this process hold these groups too: they stay
    return start_groups()


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3.6", "tiny-glm5.2"])
def test_the_matrices_are_those_that_updates_move(name, groups):
    model = build_blank_model(get_preset(name), groups, dtype=torch.float32)
    wanted = {matrix.name for matrix in find_projections(model)}
    assert {parameter for parameter, _ in model.named_parameters() if is_projection(parameter)} == wanted


def test_counted_bytes_are_those_of_the_versions(tmp_path):
    preset = get_preset("tiny-llama")
    args = parse_arguments("--logra-rank 8 --lora-rank 4".split())
    counted = count_bytes(preset, logra_rank=8, lora_rank=4)
    writer = Writer(preset, tmp_path, torch.bfloat16, args)
    writer.write_full(0)
    writer.write_delta(1, *writer.move(1))
    writer.write_lora(2, 0)
    tensors = {n: t for path in set(tensor_files(version_folder(tmp_path, 0)).values()) for n, t in load_file(path).items()}
    assert sum(t.nbytes for t in tensors.values()) == counted["full"]
    update = load_file(version_folder(tmp_path, 1) / DELTA_FILE)
    assert sum(t.nbytes for t in update.values()) == counted["delta"]
    adapter = load_file(version_folder(tmp_path, 2) / "adapter_model.safetensors")
    assert sum(t.nbytes for t in adapter.values()) == counted["lora"]
    assert [read_manifest(version_folder(tmp_path, n)).kind for n in (0, 1, 2)] == ["full", "delta", "lora"]
    copy = HostCopy.open(version_folder(tmp_path, 0), writer.moved, "bfloat16")
    copy.apply(plan_syncs(tmp_path, [0], 1)[0])
    assert all(torch.equal(copy.matrices[n], w) for n, w in writer.weights.items())


def test_a_logra_update_of_smollm2_at_rank_64_is_a_fifth_of_the_weights_or_less():
    """The bar, by shape: also against bfloat16 weights."""
    counted = count_bytes(get_preset("smollm2-135m"), logra_rank=64, lora_rank=16)
    assert counted["full"] >= 5 * counted["delta"], counted
