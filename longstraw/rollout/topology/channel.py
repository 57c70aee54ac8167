"""Messages between the switchers of a run's hosts: authenticated lines of JSON over TCP.

Both sides hold a token. When a connection opens each shows, by an HMAC over the other's random challenge, that it does,
and each message carries an HMAC over its number and direction under a key of this connection: nobody without the token
can connect, change, repeat or insert a message. Nothing is encrypted (orders are names and numbers) and nothing is
executed.
"""

import hashlib
import hmac
import json
import os
import secrets
import socket
import stat
from pathlib import Path
from typing import Any

HANDSHAKE_SECONDS = 10.0
SEND_SECONDS = 10.0
LONGEST_LINE = 1 << 20
_CHALLENGE_BYTES = 32


class ChannelClosed(RuntimeError):
    """The other side is gone, does not hold the token, or sends what is no message."""


def read_token(path: Path, *, create: bool) -> bytes | None:
    """The run's token, made where `create` and there is none; None where there is none.

    Raises ValueError where others may read the file.
    """
    if create and not path.exists():
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            pass
        else:
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32) + "\n")
                file.flush()
                os.fsync(file.fileno())
    try:
        token = path.read_text()
    except FileNotFoundError:
        return None
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ValueError(f"{path} holds a secret and can be read by others: chmod 600 it")
    return bytes.fromhex(token.strip()) if token.endswith("\n") else None


class Channel:
    """One authenticated connection. Made on both ends at once; afterwards nothing blocks but a full send buffer."""

    def __init__(self, connection: socket.socket, token: bytes, *, leads: bool, introduction: dict[str, Any] | None = None):
        """leads: whether this is the leader's end. introduction: what the follower says of itself; the leader finds it
        in `peer`.

        Raises ChannelClosed where the other side is late or does not hold the token.
        """
        self._connection, self._received, self._sent_count, self._received_count = connection, b"", 0, 0
        self._me, self._other = (b"leader", b"follower") if leads else (b"follower", b"leader")
        connection.settimeout(HANDSHAKE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own = secrets.token_bytes(_CHALLENGE_BYTES)
        try:
            connection.sendall(own)
            other = self._receive_exactly(_CHALLENGE_BYTES)
            challenges = own + other if leads else other + own
            self._key = hmac.digest(token, b"channel" + challenges, hashlib.sha256)
            # Under the key of both challenges a proof cannot be one that was heard before; the side is part of it.
            connection.sendall(hmac.digest(self._key, self._me, hashlib.sha256))
            proof = self._receive_exactly(hashlib.sha256().digest_size)
            if not hmac.compare_digest(proof, hmac.digest(self._key, self._other, hashlib.sha256)):
                raise ChannelClosed("the other side does not hold this run's token")
            while leads and b"\n" not in self._received:
                self._received += self._receive_some()
        except OSError as error:
            raise ChannelClosed(f"no greeting: {error}") from None
        self.peer: dict[str, Any] = self._take_lines(limit=1)[0] if leads else {}
        if not leads:
            self.send(introduction or {})
        connection.setblocking(False)

    def send(self, content: dict[str, Any]) -> None:
        """Send one message. Raises ChannelClosed where the other side is gone or does not read."""
        body = json.dumps(content, allow_nan=False).encode()
        line = self._sign(body, self._me, self._sent_count).hex().encode() + b" " + body + b"\n"
        self._sent_count += 1
        try:
            self._connection.settimeout(SEND_SECONDS)
            self._connection.sendall(line)
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        finally:
            if self._connection.fileno() >= 0:
                self._connection.setblocking(False)

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have come in, without waiting. Raises ChannelClosed where the other side has hung up and
        nothing is left, or sends what is no message."""
        try:
            while True:
                part = self._connection.recv(1 << 16)
                if not part:
                    if b"\n" in self._received:
                        break
                    raise ChannelClosed("the other side has hung up")
                self._received += part
        except BlockingIOError:
            pass
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        return self._take_lines()

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def _take_lines(self, limit: int | None = None) -> list[dict[str, Any]]:
        found = []
        while b"\n" in self._received and (limit is None or len(found) < limit):
            line, _, self._received = self._received.partition(b"\n")
            shown, _, body = line.partition(b" ")
            wanted = self._sign(body, self._other, self._received_count).hex().encode()
            if not hmac.compare_digest(shown, wanted):
                raise ChannelClosed("a message is not the other side's")
            self._received_count += 1
            found.append(json.loads(body))
        if len(self._received) > LONGEST_LINE:
            raise ChannelClosed(f"a message is longer than {LONGEST_LINE} bytes")
        return found

    def _sign(self, body: bytes, side: bytes, number: int) -> bytes:
        return hmac.digest(self._key, side + number.to_bytes(8, "big") + body, hashlib.sha256)

    def _receive_some(self) -> bytes:
        part = self._connection.recv(1 << 16)
        if not part or len(self._received) > LONGEST_LINE:
            raise ChannelClosed("the other side hung up in its greeting")
        return part

    def _receive_exactly(self, count: int) -> bytes:
        while len(self._received) < count:
            self._received += self._receive_some()
        taken, self._received = self._received[:count], self._received[count:]
        return taken
