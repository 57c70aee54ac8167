"""Messages over a socket: whole, bounded in size and time, and never anything but JSON."""

import math
import pickle
import socket
import struct
import threading
import time

import pytest

from longstraw.rollout.wire import LONGEST_MESSAGE, Deadline, WireError, receive_message, send_message


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def test_messages_arrive_in_order_and_whole(pair):
    left, right = pair
    large = {"ids": list(range(300_000))}

    def send():
        for message in (large, {"text": "ü"}, {}):
            send_message(left, message, Deadline(20))
        left.close()

    thread = threading.Thread(target=send)
    thread.start()
    assert [receive_message(right, Deadline(20)) for _ in range(3)] == [large, {"text": "ü"}, {}]
    assert receive_message(right, Deadline(20)) is None  # hung up between two
    thread.join()


@pytest.mark.parametrize(
    "sent, message",
    [
        (struct.pack(">Q", 20) + b'{"half":', "hung up within a message"),
        (b"\0\0\0", "hung up within a message"),
        (struct.pack(">Q", LONGEST_MESSAGE + 1), "longer than"),
        (struct.pack(">Q", 9) + b"not json!", "not a message"),
        (struct.pack(">Q", 2) + b"[]", "no JSON object"),
        (struct.pack(">Q", len(pickle.dumps({}))) + pickle.dumps({}), "not a message"),
    ],
)
def test_what_is_no_message_is_refused(pair, sent, message):
    left, right = pair
    left.sendall(sent)
    left.close()
    with pytest.raises(WireError, match=message):
        receive_message(right, Deadline(5))


def test_nobody_is_waited_for_beyond_the_deadline(pair):
    left, right = pair
    started = time.monotonic()
    with pytest.raises(WireError, match="no answer within 0 s"):
        receive_message(right, Deadline(0.2))
    with pytest.raises(WireError, match="read nothing"):
        send_message(left, {"ids": list(range(500_000))}, Deadline(0.2))
    assert time.monotonic() - started < 5


def test_a_message_that_stops_in_its_middle_is_not_waited_for(pair):
    left, right = pair
    left.sendall(struct.pack(">Q", 100) + b"{")
    with pytest.raises(WireError, match="no answer"):
        receive_message(right, Deadline(0.2))


def test_numbers_that_json_does_not_have_are_not_sent(pair):
    with pytest.raises(ValueError):
        send_message(pair[0], {"logprob": math.nan}, Deadline(5))


def test_a_peer_that_is_gone(pair):
    left, right = pair
    right.close()
    with pytest.raises(WireError, match="is gone"):
        for _ in range(3):
            send_message(left, {"ids": list(range(100_000))}, Deadline(5))
