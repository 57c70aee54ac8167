"""The hosts of a run as their leader sees them: this one, and others behind a channel, alike.

A host takes orders and has a status. `status` is None until it is of after the last order, so nobody acts on what a
host said before it heard.
"""

import time
from dataclasses import asdict
from typing import Protocol

from longstraw.rollout.topology.channel import Channel, ChannelClosed
from longstraw.rollout.topology.node import LocalNode, NodeStatus, Order

BEAT_SECONDS = 1.0


class HostLost(RuntimeError):
    """Another host is gone or silent."""


class StopAsked(Exception):
    """A signal asks for the end."""


class Host(Protocol):
    """What the machine needs of a host."""

    name: str
    stop_asked: bool
    """Whether the host's own switcher was signalled to stop."""

    problem: str
    """Why its last order could not be carried out; "" where it could."""

    def order(self, order: Order) -> None:
        """Give an order."""

    def tick(self) -> None:
        """A few times a second. Raises HostLost."""

    def status(self) -> NodeStatus | None:
        """As of after the last order; None while that has not come in."""


class LocalHost:
    """The leader's own host."""

    def __init__(self, name: str, node: LocalNode):
        self.name, self.node, self.stop_asked, self.problem = name, node, False, ""

    def order(self, order: Order) -> None:
        """See `Host`."""
        self.problem = carry_out(self.node, order)

    def tick(self) -> None:
        """See `Host`."""
        self.node.tick()

    def status(self) -> NodeStatus:
        """See `Host`."""
        return self.node.status()


class RemoteHost:
    """A follower's host, over its channel."""

    def __init__(self, name: str, channel: Channel, node_timeout: float):
        self.name, self.channel, self.node_timeout = name, channel, node_timeout
        self.stop_asked, self.problem = False, ""
        self._orders, self._answered = 0, -1
        self._status: NodeStatus | None = None
        self._heard, self._spoke = time.monotonic(), 0.0

    def order(self, order: Order) -> None:
        """See `Host`."""
        self._orders += 1
        self._send({"number": self._orders} | asdict(order))

    def leave(self, status: int) -> None:
        """Have the follower clear its host and exit with this status."""
        self._send({"leave": status})

    def tick(self) -> None:
        """See `Host`."""
        now = time.monotonic()
        if now - self._spoke > BEAT_SECONDS:
            self._send({"beat": True})
        try:
            for message in self.channel.receive():
                self._heard = now
                self._answered, self.problem = message["number"], message["problem"]
                self.stop_asked = self.stop_asked or message["stop_asked"]
                self._status = NodeStatus(**message["status"])
        except (ChannelClosed, KeyError, TypeError) as error:
            raise HostLost(f"{self.name} is lost: {error}") from None
        if now - self._heard > self.node_timeout:
            raise HostLost(f"{self.name} has been silent for {self.node_timeout:g} s (--node-timeout)")

    def status(self) -> NodeStatus | None:
        """See `Host`."""
        return self._status if self._answered == self._orders else None

    def _send(self, message: dict) -> None:
        try:
            self.channel.send(message)
        except ChannelClosed as error:
            raise HostLost(f"{self.name} is lost: {error}") from None
        self._spoke = time.monotonic()


def carry_out(node: LocalNode, order: Order) -> str:
    """Have a node obey; a sentence where it cannot, else ""."""
    try:
        node.obey(order)
    except (OSError, ValueError) as error:
        return f"{order.do} {order.role}: {error}"
    return ""
