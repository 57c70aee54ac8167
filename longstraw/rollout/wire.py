"""Messages between a rollout engine's process and its clients: JSON behind a length, over a socket on this machine.

A message is 8 bytes, big-endian, then that many bytes of UTF-8 JSON. Nothing that is received is ever executed or
unpickled. Tensors do not travel here: messages name safetensors files.

Left out: encryption (the socket is bound to loopback or to the job's own interface; a token keeps others out).
"""

import json
import math
import socket
import struct
import time
from typing import Any

LONGEST_MESSAGE = 1 << 30
"""Bytes: a longer one is not read. A group of 2M-token prompts is some 100 MB."""

LONGEST_GREETING = 4096
"""Bytes of a message from someone who has not shown the token yet."""

_LENGTH = struct.Struct(">Q")


class WireError(RuntimeError):
    """The other side is gone, late, or does not speak this protocol."""


class Deadline:
    """A moment by which something has to be done; `math.inf` seconds for none."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._at - time.monotonic())

    @property
    def passed(self) -> bool:
        """Whether it is too late."""
        return self.left() <= 0.0


def send_message(connection: socket.socket, content: dict[str, Any], deadline: Deadline) -> None:
    """Send one message.

    Raises ValueError where JSON has no such content, such as a number that is not finite: nothing is sent then; WireError
    where the other side is gone or does not read in time.
    """
    body = json.dumps(content, allow_nan=False).encode()
    if len(body) > LONGEST_MESSAGE:
        raise WireError(f"a message of {len(body)} bytes is longer than {LONGEST_MESSAGE}")
    try:
        _set_timeout(connection, deadline)
        connection.sendall(_LENGTH.pack(len(body)) + body)
    except TimeoutError:
        raise WireError(f"the other side read nothing for {deadline.seconds:.0f} s") from None
    except OSError as error:
        raise WireError(f"the other side is gone: {error}") from None


def receive_message(
    connection: socket.socket, deadline: Deadline, *, longest: int = LONGEST_MESSAGE
) -> dict[str, Any] | None:
    """One message, or None where the other side has hung up between two.

    Raises WireError where it hangs up within one, is too late, or sends what is no message.
    """
    head = _receive(connection, _LENGTH.size, deadline)
    if not head:
        return None
    length = _LENGTH.unpack(head)[0]
    if length > longest:
        raise WireError(f"a message of {length} bytes is longer than {longest}")
    body = _receive(connection, length, deadline)
    if len(body) < length:
        raise WireError("the other side hung up within a message")
    try:
        content = json.loads(body)
    except ValueError as error:
        raise WireError(f"not a message: {error}") from None
    except RecursionError:
        raise WireError("not a message: nested too deeply") from None
    if not isinstance(content, dict):
        raise WireError("not a message: no JSON object")
    return content


def _receive(connection: socket.socket, count: int, deadline: Deadline) -> bytes:
    """`count` bytes; none at all where the other side has hung up."""
    received = bytearray()
    while len(received) < count:
        try:
            _set_timeout(connection, deadline)
            part = connection.recv(min(count - len(received), 1 << 20))
        except TimeoutError:
            raise WireError(f"no answer within {deadline.seconds:.0f} s") from None
        except OSError as error:
            raise WireError(f"the other side is gone: {error}") from None
        if not part:
            if received:
                raise WireError("the other side hung up within a message")
            return b""
        received += part
    return bytes(received)


def _set_timeout(connection: socket.socket, deadline: Deadline) -> None:
    if deadline.passed:
        raise TimeoutError
    connection.settimeout(None if math.isinf(deadline.seconds) else deadline.left())
