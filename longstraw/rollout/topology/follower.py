"""A host that is not the first: it does what the leader's orders say, and ends everything when the leader is gone."""

import time
from collections.abc import Callable
from dataclasses import asdict

from longstraw.rollout.topology.channel import Channel, ChannelClosed
from longstraw.rollout.topology.hosts import BEAT_SECONDS, HostLost, carry_out
from longstraw.rollout.topology.node import LocalNode, Order

TICK_SECONDS = 0.1


def follow(
    node: LocalNode, channel: Channel, *, node_timeout: float, clear_seconds: float, stop_asked: Callable[[], bool]
) -> int:
    """Obey until the leader says to leave; returns the exit status that it gives.

    Raises HostLost, with everything on this host ended, when the leader is gone or silent.
    """
    number, problem, sent, heard, last = 0, "", 0.0, time.monotonic(), {}
    try:
        while True:
            for message in channel.receive():
                heard = time.monotonic()
                if "leave" in message:
                    clear_host(node, clear_seconds)
                    return int(message["leave"])
                if "number" in message:
                    number = message.pop("number")
                    problem = carry_out(node, Order(**message | {"ports": tuple(message["ports"])}))
                    last = {}
            node.tick()
            status = {
                "number": number, "problem": problem, "stop_asked": stop_asked(), "status": asdict(node.status()),
            }
            if status != last or time.monotonic() - sent > BEAT_SECONDS:
                channel.send(status)
                last, sent = status, time.monotonic()
            if time.monotonic() - heard > node_timeout:
                raise HostLost(f"node rank 0 has been silent for {node_timeout:g} s (--node-timeout)")
            time.sleep(TICK_SECONDS)
    except (ChannelClosed, HostLost) as error:
        clear_host(node, clear_seconds)
        raise HostLost(f"{error}; everything on this host is ended") from None
    except OSError:  # such as a full disk under the record of what runs here
        clear_host(node, clear_seconds)
        raise


def clear_host(node: LocalNode, seconds: float) -> list[str]:
    """Kill all of the run on this host and wait for empty devices; returns what stays."""
    deadline = time.monotonic() + seconds
    node.obey(Order(do="clear"))
    while not node.status().cleared and time.monotonic() < deadline:
        node.tick()
        time.sleep(TICK_SECONDS / 2)
    return node.status().held
