"""Memory over time: few moments, the highest among them, those of each phase told apart."""

import subprocess
import sys
import time

import pytest

from longstraw.receipts.memory_timeline import MOST_MOMENTS, MemoryTimeline, Track
from tests.support.ranks import REPOSITORY


def test_moments_are_thinned_and_the_highest_stays():
    track = Track()
    for size in range(10 * MOST_MOMENTS):
        track.add("replay", 10_000 if size == 777 else size)
    assert MOST_MOMENTS <= len(track.moments) < 2 * MOST_MOMENTS
    assert max(moment.bytes for moment in track.moments) == track.peaks["replay"] == 10_000
    seconds = [moment.seconds for moment in track.moments]
    assert seconds == sorted(seconds)
    kept = [moment.bytes for moment in track.moments if moment.bytes != 10_000]
    steps = [after - before for before, after in zip(kept, kept[1:])]
    assert max(steps) <= 4 * min(steps[:-1]), "as many of the beginning as of the end"


def test_what_is_held_at_a_change_belongs_to_both_phases():
    sizes = iter((1, 5, 5, 2))
    timeline = MemoryTimeline(lambda: next(sizes))
    timeline.enter("capture")  # nothing ran before
    timeline.enter("replay")
    timeline.enter(None)
    assert timeline.whole.peaks == {"capture": 5, "replay": 5}
    assert [moment.phase for moment in timeline.whole.moments] == ["capture", "capture", "replay", "replay"]


def test_a_step_has_its_own_moments():
    timeline = MemoryTimeline(lambda: 3)
    for phase in ("rollout", "replay"):
        timeline.enter(phase)
        timeline.enter(None)
        assert timeline.take_step().peaks == {phase: 3}
    assert timeline.whole.peaks == {"rollout": 3, "replay": 3}


def test_a_thread_samples_between_changes_while_it_is_entered():
    held = [0]
    timeline = MemoryTimeline(lambda: held[0], seconds_between=0.01)
    with timeline:
        timeline.enter("replay")
        held[0] = 7
        deadline = time.monotonic() + 20
        while timeline.whole.peaks["replay"] < 7 and time.monotonic() < deadline:
            time.sleep(0.01)
        held[0] = 0
        timeline.enter(None)
    assert timeline.whole.peaks == {"replay": 7}
    seen = len(timeline.whole.moments)
    time.sleep(0.05)
    assert len(timeline.whole.moments) == seen


GROW = """
from longstraw.receipts.memory_timeline import MemoryTimeline

timeline = MemoryTimeline()
timeline.enter("replay")
before = timeline.whole.peaks["replay"]
ballast = bytearray(64 << 20)
ballast[::4096] = b"1" * len(ballast[::4096])
timeline.sample()
print(timeline.whole.peaks["replay"] - before)
"""


def test_a_process_has_resident_bytes():
    """In a process of its own: a kernel may take cold pages of a large one back meanwhile."""
    shown = subprocess.run([sys.executable, "-c", GROW], capture_output=True, text=True, timeout=120, cwd=REPOSITORY)
    assert shown.returncode == 0, shown.stderr
    assert int(shown.stdout) == pytest.approx(64 << 20, rel=0.2)
