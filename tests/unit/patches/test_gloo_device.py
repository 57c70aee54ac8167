"""One network device for all gloo groups: results, threads, and what torch's own constructor still takes."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from longstraw.patches import gloo_device
from longstraw.patches.verify import PatchMismatch


def count_loops() -> int:
    """Threads of this process that wait on a gloo device."""
    return sum(name.read_text() == "gloo_tcp_loop\n" for name in Path("/proc/self/task").glob("*/comm"))


def test_many_groups_share_one_thread():
    gloo_device.share_gloo_device()
    gloo_device.share_gloo_device()
    before = count_loops()
    groups = [ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=timedelta(seconds=9)) for _ in range(8)]
    assert count_loops() <= before + 1
    assert groups[0].options._timeout == timedelta(seconds=9)
    for group in [*groups, ProcessGroupGloo(dist.HashStore(), 0, 1), ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(1))]:
        x = torch.arange(3.0)
        group.allreduce(x).wait()
        assert isinstance(group, ProcessGroupGloo) and x.tolist() == [0.0, 1.0, 2.0]


def test_options_that_a_caller_gives_are_kept():
    gloo_device.share_gloo_device()
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_default_device()]
    before = count_loops()
    assert ProcessGroupGloo(dist.HashStore(), 0, 1, options).size() == 1
    assert count_loops() == before  # its own device, made above


def test_the_interface_is_the_one_asked_for(monkeypatch):
    monkeypatch.setattr(gloo_device, "_devices", {})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with pytest.raises(RuntimeError, match="no-such-interface"):
        gloo_device._shared_devices()
    assert os.getpid() not in gloo_device._devices


def test_a_torch_without_devices_in_its_options_is_refused(monkeypatch):
    class Other:
        _Options = type("Options", (), {})
        create_device = create_default_device = None

    monkeypatch.setattr(gloo_device, "ProcessGroupGloo", Other)
    with pytest.raises(PatchMismatch, match="_devices"):
        gloo_device.share_gloo_device()
