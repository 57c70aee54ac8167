"""The tracker of live bytes: against torch's own, and by category, place and phase."""

import torch
import torch.nn.functional as F
from torch.distributed._tools.mem_tracker import MemTracker

from longstraw.dry_run.shapes_only import ShapesOnly
from longstraw.dry_run.tracker import MemoryTracker
from longstraw.memory_scopes import memory_scope

KB = 1024


def floats(kilobytes: int) -> torch.Tensor:
    return torch.zeros(kilobytes * KB // 4)


class Recurrent(torch.nn.Module):
    """Embedding, GRU and projection: fused and ordinary operations, in-place ones, views of one buffer."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(50, 24), torch.nn.Linear(16, 50)
        self.gru = torch.nn.GRU(24, 16, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.gru(self.embedding(tokens))[0]).flatten(0, 1), tokens.flatten())


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, after=lambda: None) -> None:
    for _ in range(steps):
        model(torch.randint(50, (3, 7))).backward()
        optimizer.step()
        optimizer.zero_grad()
        after()


def test_agrees_with_torchs_tracker_to_the_byte():
    model = Recurrent()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    theirs, ours = MemTracker(), MemoryTracker()
    theirs.track_external(model, optimizer)
    ours.claim(model.parameters(), "weights")
    with theirs, ours:
        with ours.phase("train", "chunk_graph"):
            train(model, optimizer, 3, theirs.reset_mod_stats)
    peak = theirs.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    now = theirs.get_tracker_snapshot("current")[torch.device("cpu")]["Total"]
    assert ours.phases["train"]["device"].bytes == peak > 3 * 4 * sum(p.numel() for p in model.parameters())
    assert sum(ours.live["device"].values()) == ours.live_bytes == now


def test_shapes_hold_what_numbers_hold():
    found = []
    for tracker in (MemoryTracker(), ShapesOnly()):
        with tracker:
            model = Recurrent()
            tracker.claim(model.parameters(), "weights")
            optimizer = torch.optim.AdamW(model.parameters())
            with tracker.phase("train", "chunk_graph"):
                train(model, optimizer, 2)
        found.append((tracker.phases["train"]["device"], tracker.live))
    assert found[0] == found[1]


def test_scopes_say_what_a_tensor_is_for_and_where_it_lies():
    with MemoryTracker() as tracker, tracker.phase("work", "chunk_graph"):
        graph = floats(3)
        with memory_scope("adjoints"):
            adjoint = floats(5)
            with memory_scope(place="host"):
                page = floats(7)
                with memory_scope("staging", "device"):
                    copy = page.clone()
        assert tracker.live == {
            "device": {"chunk_graph": 3 * KB, "adjoints": 5 * KB, "staging": 7 * KB}, "host": {"adjoints": 7 * KB}
        }
        del graph, adjoint, page, copy
        assert tracker.live_bytes == 0
    assert tracker.phases["work"]["device"].bytes == 15 * KB and tracker.phases["work"]["host"].bytes == 7 * KB


def test_a_peak_keeps_what_it_was_made_of():
    with MemoryTracker() as tracker:
        with tracker.phase("first", "chunk_graph"):
            kept, lost = floats(2), floats(4)
            del lost
            with memory_scope("logits"):
                lost = floats(3)
            del lost
        with tracker.phase("second", "buffers"):
            floats(1)
    peaks = {name: peak["device"] for name, peak in tracker.phases.items()}
    assert (peaks["first"].bytes, peaks["first"].categories) == (6 * KB, {"chunk_graph": 6 * KB})
    assert (peaks["second"].bytes, peaks["second"].categories) == (3 * KB, {"chunk_graph": 2 * KB, "buffers": KB})
    del kept


def test_a_claim_counts_for_its_whole_phase_and_moves_what_was_counted_before():
    with MemoryTracker() as tracker:
        with tracker.phase("build", "buffers"):
            weight, other = floats(2), floats(8)
            tracker.claim([weight], "weights")
            del other
        assert tracker.phases["build"]["device"].categories == {"weights": 2 * KB, "buffers": 8 * KB}
        tracker.claim([weight], "reference", "host")
        assert tracker.live == {"device": {}, "host": {"reference": 2 * KB}}
        del weight
        assert tracker.live == {"device": {}, "host": {}}


def test_a_phase_inside_another_interrupts_it():
    with MemoryTracker() as tracker, tracker.phase("outer", "buffers"):
        floats(2)
        with tracker.phase("inner", "chunk_graph"):
            floats(9)
        floats(3)
    assert tracker.phases["outer"]["device"].bytes == 3 * KB and tracker.phases["inner"]["device"].bytes == 9 * KB


def test_a_kernels_own_bytes_count_for_a_moment():
    with MemoryTracker() as tracker, tracker.phase("work", "chunk_graph"):
        kept = floats(1)
        with memory_scope("buffers"):
            tracker.hold_for_a_moment(5 * KB)
        kept = floats(2)
    assert tracker.phases["work"]["device"].categories == {"chunk_graph": KB, "buffers": 5 * KB}
    assert tracker.live_bytes == 2 * KB
    del kept
