"""The channel between hosts: only who holds the token gets in, and no message can be changed, repeated or made up."""

import json
import socket
import threading
import time

import pytest

from longstraw.rollout.topology.channel import Channel, ChannelClosed, read_token
from longstraw.rollout.topology.gathering import choose_free_ports, find_interface, gather_followers, join_leader, split_rendezvous
from longstraw.rollout.topology.hosts import HostLost
from longstraw.rollout.topology.node import Order

TOKEN = b"t" * 32


def open_pair(leader_token: bytes = TOKEN, follower_token: bytes = TOKEN):
    """Both ends of a channel, and the follower's socket; an exception in place of an end that could not be made."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        right = socket.create_connection(server.getsockname())
        left = server.accept()[0]
    ends: dict[bool, object] = {}

    def make(connection, token, leads):
        try:
            ends[leads] = Channel(connection, token, leads=leads, introduction=None if leads else {"rank": 1})
        except ChannelClosed as error:
            ends[leads] = error
            connection.close()

    threads = [threading.Thread(target=make, args=each) for each in ((left, leader_token, True), (right, follower_token, False))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends[True], ends[False], right


def receive(channel: Channel, count: int) -> list[dict]:
    found, deadline = [], time.monotonic() + 5
    while len(found) < count and time.monotonic() < deadline:
        found += channel.receive()
    return found


def test_messages_go_both_ways_in_order():
    leader, follower, _ = open_pair()
    assert leader.peer == {"rank": 1}
    for number in range(3):
        leader.send({"number": number})
        follower.send({"answer": number})
    assert receive(follower, 3) == [{"number": n} for n in range(3)]
    assert receive(leader, 3) == [{"answer": n} for n in range(3)]
    follower.close()
    with pytest.raises(ChannelClosed, match="hung up"):
        receive(leader, 1)


def test_another_token_is_refused_on_both_sides():
    ends = open_pair(follower_token=b"x" * 32)[:2]
    assert all(isinstance(end, ChannelClosed) for end in ends)
    assert "does not hold this run's token" in str(ends[0]) + str(ends[1])


@pytest.mark.parametrize("tamper", ["changed", "repeated", "unsigned", "reflected"])
def test_a_message_that_the_other_side_did_not_send_closes_the_channel(tamper):
    leader, follower, connection = open_pair()
    body = json.dumps({"answer": 1}).encode()
    line = follower._sign(body, b"follower", 0).hex().encode() + b" " + body + b"\n"
    if tamper == "changed":
        connection.sendall(line.replace(b"1}", b"2}"))
    elif tamper == "repeated":
        connection.sendall(line + line)
    elif tamper == "unsigned":
        connection.sendall(body + b"\n")
    else:
        leader.send({"number": 1})
        connection.setblocking(True)
        connection.sendall(connection.recv(4096))
    with pytest.raises(ChannelClosed, match="not the other side's"):
        receive(leader, 2)


def test_a_token_is_made_once_and_is_the_owners_alone(tmp_path):
    path = tmp_path / "token"
    assert read_token(path, create=False) is None
    token = read_token(path, create=True)
    assert len(token) == 32 and read_token(path, create=True) == token and path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(ValueError, match="can be read by others"):
        read_token(path, create=False)


def gather(tmp_path, fingerprints: dict[int, str], **settings):
    """What the leader finds when followers with these fingerprints come."""
    token_file = tmp_path / "token"
    threads = [
        threading.Thread(target=lambda rank=rank, own=own: join_leader(
            ("127.0.0.1", 0), rank, token_file, own, seconds=5, stop_asked=lambda: False), daemon=True)
        for rank, own in fingerprints.items()
    ]
    for thread in threads:
        thread.start()
    return gather_followers(
        ("127.0.0.1", 0), 3, token_file, "same", node_timeout=5, stop_asked=lambda: False, **{"seconds": 10} | settings
    )


def test_followers_are_gathered_in_order_through_a_port_of_the_systems(tmp_path):
    hosts = gather(tmp_path, {2: "same", 1: "same"})
    assert [host.name for host in hosts] == ["node-1", "node-2"] and (tmp_path / "port").read_text().strip().isdecimal()


def test_a_host_with_other_flags_is_refused(tmp_path):
    with pytest.raises(ValueError, match="node rank 1 at 127.0.0.1 was started with other flags than node rank 0"):
        gather(tmp_path, {1: "other"})


def test_a_missing_host_is_named(tmp_path):
    with pytest.raises(HostLost, match=r"node ranks \[2\] have not come within 1 s"):
        gather(tmp_path, {1: "same"}, seconds=1)


def test_a_missing_leader_is_named(tmp_path):
    read_token(tmp_path / "token", create=True)
    with pytest.raises(HostLost, match="node rank 0 at 127.0.0.1 was not reached within 0.6 s"):
        join_leader(("127.0.0.1", 1), 1, tmp_path / "token", "same", seconds=0.6, stop_asked=lambda: False)


@pytest.mark.parametrize("text, place", [
    ("node0", ("node0", 0)), ("node0:29400", ("node0", 29400)), ("[fe80::1]:5", ("fe80::1", 5)), ("[fe80::1]", ("fe80::1", 0)),
])
def test_a_rendezvous_is_read(text, place):
    assert split_rendezvous(text) == place


@pytest.mark.parametrize("text", ["", ":5", "node0:", "node0:0", "node0:65536", "node0:x", "fe80::1", "a:1:2"])
def test_what_is_no_rendezvous_is_refused(text):
    with pytest.raises(ValueError, match="--rendezvous"):
        split_rendezvous(text)


def test_ports_differ_and_the_interface_of_an_address_is_found():
    assert len(set(choose_free_ports("127.0.0.1", 8))) == 8
    assert find_interface("127.0.0.1") == "lo" and find_interface("203.0.113.9") == ""


@pytest.mark.parametrize("fields", [
    {"do": "run", "role": "trainer"}, {"do": "start", "role": "shell"}, {"do": "clear", "role": "trainer"}, {"do": "start"},
    {"do": "start", "role": "trainer", "step": -1}, {"do": "start", "role": "trainer", "step": "1"},
    {"do": "start", "role": "trainer", "ports": ("; rm",)}, {"do": "start", "role": "ray", "ports": tuple(range(17))},
])
def test_an_order_can_only_be_one_that_there_is(fields):
    with pytest.raises(ValueError, match="no order"):
        Order(**fields)
