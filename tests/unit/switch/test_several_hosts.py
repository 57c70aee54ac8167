"""Two hosts for real: network namespaces joined by a veth pair, a switcher in each, torchrun --nnodes 2 across them."""

import signal
import time

import pytest

from tests.support.two_hosts import NODE_TIMEOUT, explain_absence, hosts, switches  # noqa: F401

pytestmark = [
    pytest.mark.ranks(seconds=160), pytest.mark.timeout(600),
    pytest.mark.skipif(bool(explain_absence()), reason=f"NOT TESTED: the switcher over two hosts: {explain_absence()}"),
]


def test_a_host_is_cut_off_and_the_run_goes_on_when_it_is_back(hosts, switches):
    first, second = switches(1)
    first.hold("training", 1)
    for switch in (first, second):
        switch.start()
    together = first.folder / "together-1"
    first.wait_until(together.exists, "all ranks in training of step 1", 200)
    hosts.cut()
    cut = time.monotonic()
    try:
        assert [switch.wait(60) for switch in (first, second)] == [1, 1]
        assert time.monotonic() - cut < NODE_TIMEOUT + 20
        for switch in (first, second):
            assert list(switch.marked()) == []
            assert f"silent for {NODE_TIMEOUT:g} s" in switch.output.read_text()
        assert first.lines()[-2]["event"] == "lost" and first.lines()[-1] | {"time": ""} == {
            "time": "", "event": "end", "status": 1,
        }
    finally:
        hosts.mend()
    first.release("training", 1)
    kept = first.rollouts()
    for switch in (first, second):
        switch.start()
    assert [switch.wait(250) for switch in (first, second)] == [0, 0], first.output.read_text() + second.output.read_text()
    assert kept.items() <= first.rollouts().items()
    first.check_outcome(1)
    assert list(second.marked()) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_host_stops_all(switches, rank):
    both = switches(2)
    both[0].hold("generating", 1)
    for switch in both:
        switch.start()
    both[0].wait_until(lambda: both[0].find("generator", "main"), "the generator")
    both[rank].process.send_signal(signal.SIGTERM)
    assert [switch.wait(30) for switch in both] == [75, 75], both[0].output.read_text()
    for switch in both:
        switch.check_nothing_left()


def test_a_killed_host_ends_the_others(switches, monkeypatch):
    monkeypatch.setenv("QUICK_SWITCH_ALONE", "1")
    both = switches(2)
    both[0].hold("training", 1)
    for switch in both:
        switch.start()
    both[0].wait_until(lambda: both[0].find("trainer", "main") and both[1].find("trainer", "main"), "both trainers")
    both[1].process.kill()
    assert both[0].wait(30) == 1
    both[1].process.wait()
    both[1].wait_for_nothing()
    assert list(both[0].marked()) == []
