"""Two hosts for real: network namespaces joined by a veth pair, a switcher in each, torchrun --nnodes 2 across them."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from longstraw.rollout.vllm_client.process import find_vllm_python
from tests.support.switches import Switch

if os.geteuid() != 0 or shutil.which("ip") is None:
    pytest.skip(
        "NOT TESTED: the switcher over two hosts needs root and iproute2 (network namespaces)", allow_module_level=True
    )

pytestmark = pytest.mark.ranks(seconds=60)
NODE_TIMEOUT = 4.0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class TwoHosts:
    """Two namespaces of their own, with one cable between them."""

    def __init__(self):
        self.names = [f"switch-{os.getpid()}-{rank}" for rank in (0, 1)]
        self.cables = [f"sw{os.getpid()}-{rank}" for rank in (0, 1)]
        self.addresses = ["198.18.41.1", "198.18.41.2"]
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", self.cables[0], "netns", self.names[0], "type", "veth", "peer", "name", self.cables[1], "netns",
           self.names[1])
        for name, cable, address in zip(self.names, self.cables, self.addresses):
            ip("-n", name, "address", "add", f"{address}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
        for name, other in zip(self.names, self.addresses[::-1]):
            ip("-n", name, "route", "add", "default", "via", other)  # Ray asks the routes for its own address

    def cut(self) -> None:
        ip("-n", self.names[1], "link", "set", self.cables[1], "down")

    def mend(self) -> None:
        ip("-n", self.names[1], "link", "set", self.cables[1], "up")

    def close(self) -> None:
        for name in self.names:
            ip("netns", "delete", name)


@pytest.fixture(scope="module")
def hosts():
    two = TwoHosts()
    yield two
    two.close()


@pytest.fixture
def switches(hosts, tmp_path):
    """Makes a switcher for each host; ends them all."""
    made = []

    def make(steps: int, **settings) -> list[Switch]:
        for rank, name in enumerate(hosts.names):
            made.append(Switch(
                tmp_path, steps, rank=rank, place=(str(rank), "2", hosts.addresses[0]),
                prefix=("ip", "netns", "exec", name), node_timeout=NODE_TIMEOUT, training_seconds=60.0, **settings,
            ))
        return made

    yield make
    for switch in made:
        switch.end()


def test_a_host_is_cut_off_and_the_run_goes_on_when_it_is_back(hosts, switches):
    first, second = switches(2)
    first.hold("training", 1)
    for switch in (first, second):
        switch.start()
    together = first.folder / "together-1"
    first.wait_until(together.exists, "all ranks in training of step 1")
    hosts.cut()
    cut = time.monotonic()
    try:
        assert [switch.wait(30) for switch in (first, second)] == [1, 1]
        assert time.monotonic() - cut < 3 * NODE_TIMEOUT
        for switch in (first, second):
            assert list(switch.marked()) == []
            assert "silent for 4 s" in switch.output.read_text()
        assert first.lines()[-2]["event"] == "lost" and first.lines()[-1] | {"time": ""} == {
            "time": "", "event": "end", "status": 1,
        }
    finally:
        hosts.mend()
    first.release("training", 1)
    kept = first.rollouts()
    for switch in (first, second):
        switch.start()
    assert [switch.wait(90) for switch in (first, second)] == [0, 0], first.output.read_text() + second.output.read_text()
    assert kept.items() <= first.rollouts().items()
    first.check_outcome(2)
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


def test_a_killed_host_ends_the_others(switches):
    both = switches(2)
    both[0].hold("training", 1)
    for switch in both:
        switch.start()
    both[0].wait_until((both[0].folder / "together-1").exists, "all ranks in training of step 1")
    both[1].process.kill()
    assert both[0].wait(30) == 1
    both[1].process.wait()
    both[1].wait_for_nothing()
    assert list(both[0].marked()) == []


def has_ray() -> str:
    """Why Ray cannot be started here; "" where it can."""
    try:
        python = find_vllm_python()
    except ValueError as error:
        return str(error)
    return "" if python.with_name("ray").exists() else f"{python.parent.parent} has no Ray (requirements/ray.txt)"


@pytest.mark.skipif(bool(has_ray()), reason=f"NOT TESTED: Ray over two hosts: {has_ray()}")
def test_ray_spans_the_hosts_while_the_engine_serves_and_is_gone_after_it(switches, monkeypatch):
    monkeypatch.setenv("QUICK_SWITCH_RAY", "1")
    both = switches(1, rollout_up_seconds=150.0)
    both[0].hold("generating", 1)
    for switch in both:
        switch.start()
    both[0].wait_for("done", "rollout_up", 1, 170)
    workers = json.loads((both[0].folder / "ready.json").read_text())["workers"]
    assert sorted(address for _, address, _ in workers) == ["198.18.41.1", "198.18.41.2"]
    assert len({pid for pid, _, _ in workers}) == len({node for _, _, node in workers}) == 2
    both[0].process.send_signal(signal.SIGTERM)
    assert [switch.wait(30) for switch in both] == [75, 75]
    for switch in both:
        switch.check_nothing_left()
    assert not any(psutil.pid_exists(pid) for pid, _, _ in workers)
    assert not list(Path(tempfile.gettempdir()).glob("longstraw-ray-*"))
