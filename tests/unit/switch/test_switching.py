"""The switcher over quick programs: ten switches, two loops at once, signals, failures, deadlines, one switcher a
run."""

import signal
import time

import pytest

from longstraw.rollout.topology.config import DeadlineConfig
from tests.support.switches import Switch

pytestmark = pytest.mark.ranks(seconds=45)


@pytest.fixture
def make(tmp_path):
    """Makes switchers, each in a folder of its name, and ends them."""
    made = []

    def make_one(steps: int, name: str = "run", **settings) -> Switch:
        made.append(Switch(tmp_path / name, steps, **settings))
        return made[-1]

    yield make_one
    for switch in made:
        switch.end()


def test_ten_switches_in_a_row_and_two_loops_at_once_leave_nothing(make):
    loops = [make(10, "first"), make(10, "second")]
    for loop in loops:
        loop.start()
    for loop in loops:
        assert loop.wait(120) == 0, loop.output.read_text()
        loop.check_outcome(10)
        emptied = [line for line in loop.lines() if line.get("state") in ("draining", "rollout_down") and line["event"] == "done"]
        assert len(emptied) == 20
        held = [sum(line["memory"]["node-0"][name] for name in ("resident_bytes", "device_bytes")) for line in emptied]
        assert held == [0] * 20
        own = [line["memory"]["switcher"]["resident_bytes"] for line in emptied]
        # the first switch imports and allocates; from the second on nothing grows
        assert max(own[2:]) <= 1.01 * own[2], own


def test_a_second_switcher_of_a_run_is_refused(make):
    first, second = make(1), make(1)
    first.hold("training", 1)
    first.start()
    first.wait_for("enter", "training", 1)
    second.start()
    assert second.wait(20) == 1
    assert "another switcher runs in" in second.output.read_text()
    first.release("training", 1)
    assert first.wait(20) == 0
    first.check_outcome(1)


@pytest.mark.parametrize("phase, state", [("training", "training"), ("rollout_up", "rollout_up"), ("generating", "generating")])
def test_a_signal_ends_everything_and_the_run_goes_on(make, phase, state):
    switch = make(1)
    switch.hold(phase, 1)
    switch.start()
    switch.wait_for("enter", state, 1)
    switch.process.send_signal(signal.SIGTERM)
    assert switch.wait(20) == 75, switch.output.read_text()
    switch.check_nothing_left()
    assert [line["event"] for line in switch.lines()][-2:] == ["stopped", "end"]
    switch.release(phase, 1)
    switch.start()
    assert switch.wait(20) == 0
    switch.check_outcome(1)


def test_a_second_signal_does_not_wait(make):
    switch = make(1, grace_seconds=100.0)
    switch.hold("rollout_down", 1)
    switch.start()
    switch.wait_for("done", "rollout_up", 1)
    asked = time.monotonic()
    switch.process.send_signal(signal.SIGTERM)
    switch.wait_until(lambda: "stopped by a signal" in switch.output.read_text(), "the first signal's effect")
    switch.process.send_signal(signal.SIGTERM)
    assert switch.wait(20) == 75 and time.monotonic() - asked < 15
    switch.check_nothing_left()


def test_a_state_beyond_its_deadline_is_given_up_after_the_attempts(make):
    switch = make(1, generating_seconds=0.5, attempts=2)
    switch.hold("generating", 1)
    switch.start()
    assert switch.wait(30) == 1
    failed = [line for line in switch.lines() if line["event"] == "failed"]
    assert len(failed) == 2 and "longer than the 0.5 s of --generating-seconds" in failed[0]["reason"]
    assert switch.lines()[-2]["event"] == "gave_up" and "2 times in a row (--attempts)" in switch.lines()[-2]["reason"]
    switch.check_nothing_left()


@pytest.mark.parametrize("phase", ["generating", "training"])
def test_a_program_that_refuses_its_flags_is_not_tried_again_and_heard_on_the_terminal(make, phase):
    switch = make(1)
    (switch.folder / f"refuse-{phase}-1").touch()
    switch.start()
    assert switch.wait() == 2
    assert f"{phase} of step 1 cannot be run" in switch.output.read_text()
    assert "and says: quick: error: no such flag" in switch.output.read_text().splitlines()[-1]
    assert len([line for line in switch.lines() if line["event"] == "failed"]) == 1 and switch.lines()[-1]["status"] == 2
    switch.check_nothing_left()


def test_what_the_journal_tells_of_must_be_there(make):
    switch = make(1)
    switch.hold("training", 1)
    switch.start()
    switch.wait_for("enter", "training", 1)
    switch.kill("switcher")
    switch.wait_for_nothing()
    (switch.folder / "rollouts-1").unlink()
    switch.start()
    assert switch.wait(20) == 1
    assert "the journal tells of the rollouts of step 1, and the store lacks them" in switch.output.read_text()


@pytest.mark.parametrize("fields, message", [
    ({"draining_seconds": 0.0}, "--draining-seconds must be finite and above 0, not 0"),
    ({"node_timeout": float("inf")}, "--node-timeout must be finite"), ({"attempts": 0}, "--attempts must be at least 1, not 0"),
])
def test_bad_deadlines_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        DeadlineConfig(**fields)
