"""The storage meter against allocations whose sizes are known."""

import torch

from longstraw.memory_meter import StorageMeter, read_peak_bytes, read_peak_rss_bytes

MB = 1 << 20


def floats(megabytes: int, **kwargs) -> torch.Tensor:
    return torch.zeros(megabytes * MB // 4, **kwargs)


def test_counts_a_storage_from_its_making_to_its_end():
    with StorageMeter() as meter:
        a = floats(3)
        b = floats(2)
        assert meter.live_bytes == 5 * MB
        del a
        assert meter.live_bytes == 2 * MB
        c = floats(1)
        del b, c
    assert (meter.live_bytes, meter.peak_bytes) == (0, 5 * MB)


def test_views_and_in_place_operations_share_a_storage():
    with StorageMeter() as meter:
        a = floats(4)
        view = a.view(2, -1)[1]
        a.add_(1)
        view.mul_(2)
        assert meter.live_bytes == 4 * MB
        del a
        assert meter.live_bytes == 4 * MB, "the view keeps the whole storage"
        del view
        assert meter.live_bytes == 0
    assert meter.peak_bytes == 4 * MB


def test_what_existed_before_does_not_count():
    before = floats(8)
    with StorageMeter() as meter:
        before.add_(1)
        view = before[: MB // 4]
        copy = view.clone()
        assert meter.live_bytes == MB
        before = view = None
        assert meter.live_bytes == MB
        del copy
    assert meter.peak_bytes == MB


def test_a_key_that_is_used_again_is_a_new_storage():
    with StorageMeter() as meter:
        for _ in range(50):
            floats(1)
        assert meter.live_bytes == 0
    assert meter.peak_bytes == MB


def test_out_and_resize_count_the_size_they_reach():
    with StorageMeter() as meter:
        out = torch.empty(0)
        torch.add(floats(2), 1, out=out)
        assert meter.live_bytes == 2 * MB
        out.resize_(3 * MB // 4)
        assert meter.live_bytes == 3 * MB


def test_tensors_from_python_data_count():
    with StorageMeter() as meter:
        kept = torch.tensor([0.0] * 1000)
        assert meter.live_bytes == 4000
        del kept
        assert meter.live_bytes == 0


def test_saved_activations_are_freed_during_backward():
    x = floats(1, requires_grad=True)
    x.grad = torch.zeros_like(x)
    with StorageMeter() as meter:
        y = x
        for _ in range(6):
            y = y.sin()  # saves its input
        loss = y.sum()
        del y
        saved = meter.live_bytes
        assert saved == 5 * MB + 4, "five saved inputs, and the loss"
        loss.backward()
        assert meter.live_bytes == 4, "only the loss: the gradient existed before"
    assert 6 * MB < meter.peak_bytes <= 9 * MB


def test_checkpointing_shows_a_lower_peak():
    from torch.utils.checkpoint import checkpoint

    def block(x):
        for _ in range(8):
            x = x.sin()
        return x

    peaks = []
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=False)):
        x = floats(1, requires_grad=True)
        with StorageMeter() as meter:
            y = x
            for _ in range(6):
                y = run(y)
            y.sum().backward()
        peaks.append(meter.peak_bytes)
    assert peaks[1] < 0.5 * peaks[0]


def test_repeats_exactly():
    def peak():
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
        x = torch.randn(128, 64)
        with StorageMeter() as meter:
            model(x).square().sum().backward()
        return meter.peak_bytes

    assert len({peak() for _ in range(3)}) == 1


def test_cheap_readings():
    assert read_peak_rss_bytes() > 10 * MB
    assert read_peak_bytes() > 0
