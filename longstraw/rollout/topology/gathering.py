"""The hosts of a run come together: the first listens, the others connect, all show that they hold the run's token.

The token lies in the run's folder, which all hosts share. Hosts whose flags differ would run different programs, so a
follower brings a fingerprint of its own, and one that does not fit is refused.
"""

import ipaddress
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

from longstraw.durable_files import write_whole
from longstraw.rollout.topology.channel import Channel, ChannelClosed, read_token
from longstraw.rollout.topology.hosts import HostLost, RemoteHost, StopAsked

RETRY_SECONDS = 0.5
PORT_FILE = "port"


def split_rendezvous(text: str) -> tuple[str, int]:
    """HOST or HOST:PORT -> (host, port); port 0: one that the system gives. An IPv6 address stands in brackets.

    Raises ValueError.
    """
    found = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]+))(?::([0-9]+))?", text)
    port = int(found[3] or 0) if found else 0
    if found is None or port >= 65_536 or found[3] == "0":
        raise ValueError(f"--rendezvous {text} is neither HOST nor HOST:PORT")
    return found[1] or found[2], port


def gather_followers(
    address: tuple[str, int], count: int, token_file: Path, fingerprint: str, *, node_timeout: float, seconds: float,
    stop_asked: Callable[[], bool],
) -> list[RemoteHost]:
    """Wait for ranks 1 to count - 1; returns them in order. Where the address has port 0, the port that the system gave
    is in a file beside the token.

    Raises HostLost where they do not all come in time, StopAsked at a signal, ValueError where one was started
    otherwise than this.
    """
    token = read_token(token_file, create=True)
    deadline = time.monotonic() + seconds
    found: dict[int, RemoteHost] = {}
    family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server(address, family=family, backlog=count) as server:
        server.settimeout(RETRY_SECONDS)
        write_whole(token_file.with_name(PORT_FILE), f"{server.getsockname()[1]}\n")
        while len(found) < count - 1:
            if stop_asked():
                raise StopAsked
            if time.monotonic() > deadline:
                missing = sorted(set(range(1, count)) - set(found))
                raise HostLost(f"node ranks {missing} have not come within {seconds:g} s (--rendezvous-seconds)")
            try:
                connection, origin = server.accept()
            except TimeoutError:
                continue
            try:
                channel = Channel(connection, token, leads=True)
                rank = channel.peer["rank"]
            except (ChannelClosed, KeyError, TypeError):
                connection.close()  # a stranger, or a follower that was ended: whoever belongs here comes again
                continue
            if channel.peer.get("fingerprint") != fingerprint:
                raise ValueError(f"node rank {rank} at {origin[0]} was started with other flags than node rank 0")
            if rank in found or rank not in range(1, count):
                raise ValueError(f"node rank {rank} came twice, or is none of 1 to {count - 1}")
            found[rank] = RemoteHost(f"node-{rank}", channel, node_timeout)
    return [found[rank] for rank in sorted(found)]


def join_leader(
    address: tuple[str, int], rank: int, token_file: Path, fingerprint: str, *, seconds: float, stop_asked: Callable[[], bool]
) -> tuple[Channel, str]:
    """Connect to the first host; returns the channel and this host's own address on the way there.

    Raises HostLost where it is not there in time, StopAsked at a signal.
    """
    deadline, problem = time.monotonic() + seconds, "no token yet"
    while time.monotonic() < deadline:
        if stop_asked():
            raise StopAsked
        token = read_token(token_file, create=False)
        if token is not None:
            try:
                port = address[1] or int(token_file.with_name(PORT_FILE).read_text())
                connection = socket.create_connection((address[0], port), timeout=RETRY_SECONDS * 4)
                introduction = {"rank": rank, "fingerprint": fingerprint}
                return Channel(connection, token, leads=False, introduction=introduction), connection.getsockname()[0]
            except (OSError, ValueError, ChannelClosed) as error:
                problem = str(error)
        time.sleep(RETRY_SECONDS)
    raise HostLost(f"node rank 0 at {address[0]} was not reached within {seconds:g} s: {problem}")


def find_interface(address: str) -> str:
    """Name of the network interface that has an address of this host; "" where none has."""
    import psutil

    wanted = ipaddress.ip_address(address)
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6) and ipaddress.ip_address(entry.address.split("%")[0]) == wanted:
                return name
    return ""


def choose_free_ports(host: str, count: int) -> tuple[int, ...]:
    """Ports that nobody listens on at an address of this host: all are held at once, so that they differ."""
    held = []
    try:
        for _ in range(count):
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            probe = socket.socket(family, socket.SOCK_STREAM)
            held.append(probe)
            probe.bind((host, 0))
        return tuple(probe.getsockname()[1] for probe in held)
    finally:
        for probe in held:
            probe.close()
