"""Megatron's CUDA questions answered on the CPU: once, twice, and only while the targets look as they did."""

import numpy
import pytest
import torch

from longstraw.patches import device
from longstraw.patches.verify import PatchMismatch
from tests.support.errors import relative_error


def test_installing_twice_changes_nothing_more():
    device.install_cpu_device_layer()
    before = dict(vars(torch.cuda))
    from megatron.core.ssm.gated_delta_net import common
    from megatron.core.tensor_parallel import random as megatron_random

    patched = (common.l2norm, common.HAVE_FLA, megatron_random._get_cuda_rng_state)
    device.install_cpu_device_layer()
    assert vars(torch.cuda) == before
    assert (common.l2norm, common.HAVE_FLA, megatron_random._get_cuda_rng_state) == patched


def test_a_changed_rng_tracker_is_refused(monkeypatch):
    from megatron.core.tensor_parallel import random as megatron_random

    def _get_cuda_rng_state(device="cuda"):
        return None

    monkeypatch.setattr(megatron_random, "_get_cuda_rng_state", _get_cuda_rng_state)
    with pytest.raises(PatchMismatch, match="_get_cuda_rng_state no longer contains"):
        device._patch_rng_tracker()
    assert megatron_random._get_cuda_rng_state is _get_cuda_rng_state, "nothing was patched"


def test_a_changed_gated_delta_net_is_refused(monkeypatch):
    from megatron.core.ssm.gated_delta_net import common

    def _prepare_input_for_gated_delta_rule(self, qkv):
        return qkv

    monkeypatch.setattr(common._GDNBase, "_prepare_input_for_gated_delta_rule", _prepare_input_for_gated_delta_rule)
    with pytest.raises(PatchMismatch, match="_prepare_input_for_gated_delta_rule no longer contains"):
        device._patch_gated_delta_net()


def test_a_removed_switch_is_refused(monkeypatch):
    from megatron.core.ssm.gated_delta_net import common

    monkeypatch.delattr(common, "HAVE_FLA")
    with pytest.raises(PatchMismatch, match="has no attribute 'HAVE_FLA'"):
        device._patch_gated_delta_net()


def test_split_sizes_of_the_token_dispatcher_become_numpy_arrays():
    """As for a CUDA tensor: the all-to-all takes no tensors for split sizes. Installed twice, it is the same."""
    from megatron.core.transformer.moe import token_dispatcher

    for _ in range(2):
        device._patch_token_dispatcher()
        sizes = torch.tensor([3, 0])
        assert isinstance(token_dispatcher.maybe_move_tensor_to_cpu(sizes, as_numpy=True), numpy.ndarray)
        assert token_dispatcher.maybe_move_tensor_to_cpu(sizes) is sizes
        assert token_dispatcher.maybe_move_tensor_to_cpu(5, as_numpy=True) == 5


def test_a_changed_token_dispatcher_is_refused(monkeypatch):
    from megatron.core.transformer.moe import moe_utils

    monkeypatch.setattr(moe_utils, "maybe_move_tensor_to_cpu", lambda tensor: tensor)
    with pytest.raises(PatchMismatch, match="no longer contains"):
        device._patch_token_dispatcher()


def test_cuda_means_cpu_only_inside_the_block():
    with device.cuda_means_cpu():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.zeros(2, device=torch.device("cuda", 0), pin_memory=True).device.type == "cpu"
        assert torch.ones(2).cuda().to("cuda").pin_memory().device.type == "cpu"
        assert torch.ones(2).type() == "torch.cuda.FloatTensor"
        with device.cuda_means_cpu():
            assert torch.ones(2).type() == "torch.cuda.FloatTensor"
        assert torch.ones(2).to(torch.float64).dtype is torch.float64
        assert torch.ones(2).to(device="cuda", dtype=torch.float64).dtype is torch.float64
        assert torch.ones(2).type(torch.float64).dtype is torch.float64
    assert torch.ones(2).type() == "torch.FloatTensor"
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")


def test_random_state_goes_round():
    """The CPU's own state stands in for the device's: saved and restored, it repeats the draws."""
    device.install_cpu_device_layer()
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)


def test_streams_and_events_have_already_happened():
    device.install_cpu_device_layer()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        event = stream.record_event()
    event.wait()
    torch.cuda.current_stream().wait_stream(stream)
    assert event.query() and torch.cuda.synchronize() is None


@pytest.mark.parametrize("dtype, bar", [(torch.float64, 1e-7), (torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_l2norm(dtype, bar):
    """x / sqrt(sum x^2 + eps), as flash-linear-attention has it: 0 stays 0, the dtype is x's."""
    x = torch.randn(3, 5, 16, dtype=torch.float64).to(dtype)
    x[0, 0] = 0
    found = device.l2norm(x)
    expected = x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert found.dtype is dtype and not found[0, 0].any()
    assert relative_error([found], [expected]) < bar
