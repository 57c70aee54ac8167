"""kill -9 of every process in every state: the run goes on and no step is taken twice, left out or sampled again.

Here over programs that start in milliseconds; tests/ranks/test_switch_loop.py does some of it over vLLM and Megatron.
"""

import threading

import pytest

from longstraw.rollout.topology.states import State
from tests.support.switches import Switch

TRAINER = ("switcher", "trainer keeper", "trainer main", "trainer first", "trainer second")
SERVER = ("switcher", "server keeper", "server main", "server first")
GENERATOR = ("generator keeper", "generator main")
WALKS = {
    ("training", "training"): [*TRAINER, "switcher,trainer keeper", "switcher,trainer main"],
    ("exporting", "exporting"): TRAINER,
    ("draining", "draining"): TRAINER,
    ("rollout_up", "rollout_up"): [*SERVER, "switcher,server keeper"],
    ("generating", "generating"): [*SERVER, *GENERATOR, "switcher,server keeper,generator keeper"],
    ("generating", "generated"): ["switcher", *GENERATOR],
    ("rollout_down", "rollout_down"): [*SERVER, "switcher,server main"],
}
"""(state, phase that its programs are held in) -> what is killed in it, at one step after another."""

pytestmark = pytest.mark.ranks(seconds=45)


def walk(state: str, phase: str, switch: Switch) -> None:
    """Kill each target in a state, one at each step, and start the switcher again where it was among them."""
    walked, seen = WALKS[state, phase], {}
    for step in range(1, len(walked) + 1):
        switch.hold(phase, step)
    switch.start()
    for step, targets in enumerate(walked, start=1):
        switch.wait_until((switch.folder / f"at-{phase}-{step}").exists, f"{phase} of step {step}")
        switch.wait_for("enter", state, step)
        switch.kill(*targets.split(","))
        seen |= switch.rollouts()
        if targets == "switcher":
            switch.wait_for_nothing()  # the keepers end what they keep, before anyone starts again
        switch.release(phase, step)
        if "switcher" in targets:
            switch.start()
    assert switch.wait() == 0, switch.output.read_text()
    again = [name for name, text in seen.items() if switch.rollouts()[name] != text]
    assert not again, f"{again} were made again"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """(state, phase) -> (the switcher, what went wrong), of walks that run side by side."""
    found: dict[tuple[str, str], tuple[Switch, BaseException | None]] = {}

    def run(place: tuple[str, str], switch: Switch) -> None:
        problem = None
        try:
            walk(*place, switch)
        except BaseException as error:
            problem = error
        finally:
            found[place] = (switch, problem)

    threads = []
    for place in WALKS:
        switch = Switch(tmp_path_factory.mktemp(place[1]), len(WALKS[place]))
        threads.append(threading.Thread(target=run, args=(place, switch)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    yield found
    for switch, _ in found.values():
        switch.end()


@pytest.mark.parametrize("place", WALKS, ids=lambda place: place[1])
def test_a_killed_process_costs_no_step(outcomes, place):
    switch, problem = outcomes[place]
    if problem is not None:
        raise problem
    switch.check_outcome(len(WALKS[place]))


def test_every_state_is_walked():
    assert {state for state, _ in WALKS} == {state.value for state in State}
