"""Two hosts on this machine: network namespaces joined by a veth pair, and a switcher in each. Needs root and iproute2.

A test module takes the fixtures `hosts` and `switches` from here.
"""

import os
import shutil
import subprocess

import pytest

from tests.support.switches import Switch

NODE_TIMEOUT = 12.0


def explain_absence() -> str:
    """Why there can be none here; "" where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    return "" if shutil.which("ip") else "network namespaces need iproute2's ip"


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
                prefix=("ip", "netns", "exec", name), node_timeout=NODE_TIMEOUT, training_seconds=200.0, **settings,
            ))
        return made

    yield make
    for switch in made:
        switch.end()
