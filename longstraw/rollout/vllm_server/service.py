"""The socket: who may ask, one message after another, and answers.

A connection's first message shows the token; without it the connection is closed. Then each message gets one answer:
`{"ok": true, ...}`, or `{"ok": false, "kind": ..., "error": sentence}`. `status` is answered at once, whatever the engine
does; everything else waits for the engine, which does one thing at a time, until the message's own deadline.

Left out: more than a handful of clients, which a trainer and its switcher are.
"""

import hmac
import os
import queue
import select
import socket
import threading
import traceback
from collections.abc import Callable
from typing import Any

from longstraw.rollout.protocol import WeightVersionError
from longstraw.rollout.wire import LONGEST_GREETING, Deadline, WireError, receive_message, send_message

_GREETING_SECONDS = 10.0
_ANSWER_SECONDS = 120.0
_LONGEST_DEADLINE = 1e9
_MOST_CLIENTS = 16
_MOST_STRANGERS = 64
"""Connections that have not shown the token yet; for one more the oldest is closed, so that silent ones keep nobody out."""

# What a client asks of the engine: method of Engine -> names of its arguments in the message.
_CALLS = {"sync": ("path", "version"), "checksums": (), "sleep": ("level",), "wake": ()}


class Service:
    """Accepts connections, and hands their messages to the thread that owns the engine (`run`)."""

    def __init__(self, address: str, token: str, *, end: Callable[[], None]):
        """Bind to a port that the system chooses. end: called when a client asks for the end."""
        self.token, self.end = token, end
        self.listener = socket.create_server((address, 0))
        self.port = self.listener.getsockname()[1]
        self.state: dict[str, Any] = {"state": "starting"}
        self._jobs: queue.Queue[_Job] = queue.Queue()
        self._clients = threading.BoundedSemaphore(_MOST_CLIENTS)
        self._strangers: list[socket.socket] = []
        self._lock = threading.Lock()

    def accept(self) -> None:
        """Serve connections, a thread each; never returns."""
        while True:
            connection, _ = self.listener.accept()
            with self._lock:
                self._strangers.append(connection)
                if len(self._strangers) > _MOST_STRANGERS:
                    _hang_up(self._strangers.pop(0))
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def run(self, engine) -> None:
        """Do the jobs, in the thread that made the engine; never returns."""
        self.state = {"state": "ready"} | engine.status()
        while True:
            job = self._jobs.get()
            self.state = {"state": str(job.message.get("op"))} | engine.status()
            job.answer = _answer(engine, job) | engine.status()
            self.state = {"state": "ready"} | engine.status()
            job.done.set()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                if self._greet(connection):
                    try:
                        self._serve_client(connection)
                    finally:
                        self._clients.release()
        except WireError:
            pass  # the client is gone: there is nobody to tell

    def _serve_client(self, connection: socket.socket) -> None:
        while (message := receive_message(connection, Deadline(float("inf")))) is not None:
            answer = self._dispatch(connection, message)
            try:
                send_message(connection, answer, Deadline(_ANSWER_SECONDS))
            except ValueError as error:
                refused = {"ok": False, "kind": "engine", "error": f"the engine's answer has what no message can: {error}"}
                send_message(connection, refused, Deadline(_ANSWER_SECONDS))

    def _greet(self, connection: socket.socket) -> bool:
        """Whether the token was shown and there is room; a place among the clients is taken then."""
        deadline = Deadline(_GREETING_SECONDS)
        try:
            message = receive_message(connection, deadline, longest=LONGEST_GREETING) or {}
        finally:
            with self._lock:
                if connection in self._strangers:  # else there was no room for it any more
                    self._strangers.remove(connection)
        shown = str(message.get("token", "")).encode(errors="backslashreplace")
        if not hmac.compare_digest(shown, self.token.encode()):
            send_message(connection, {"ok": False, "kind": "token", "error": "wrong token"}, deadline)
            return False
        if not self._clients.acquire(blocking=False):
            sentence = f"it has {_MOST_CLIENTS} clients already, and takes no more"
            send_message(connection, {"ok": False, "kind": "busy", "error": sentence}, deadline)
            return False
        try:
            send_message(connection, {"ok": True} | self._status(), deadline)
        except BaseException:
            self._clients.release()
            raise
        return True

    def _status(self) -> dict[str, Any]:
        return self.state | {"pid": os.getpid()}

    def _dispatch(self, connection: socket.socket, message: dict[str, Any]) -> dict[str, Any]:
        operation = message.get("op")
        if not isinstance(operation, str):
            return {"ok": False, "kind": "value", "error": "op must be the name of an operation"}
        if operation == "status":
            return {"ok": True} | self._status()
        if operation == "stop":
            self.end()
            return {"ok": True}
        seconds = message.get("deadline_seconds", 0.0)
        if type(seconds) not in (int, float) or not abs(seconds) < _LONGEST_DEADLINE:
            sentence = f"deadline_seconds must be a number of seconds below {_LONGEST_DEADLINE:g}"
            return {"ok": False, "kind": "value", "error": sentence}
        job = _Job(message, Deadline(float(seconds)), connection)
        self._jobs.put(job)
        job.done.wait()
        return job.answer


def _hang_up(connection: socket.socket) -> None:
    """Wake the thread that reads from a connection: it reads the end."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the other side, or our own thread, was faster


class _Job:
    def __init__(self, message: dict[str, Any], deadline: Deadline, connection: socket.socket):
        self.message, self.deadline, self.connection = message, deadline, connection
        self.done = threading.Event()
        self.answer: dict[str, Any] = {}

    def gone(self) -> bool:
        """Whether the client has hung up: nothing else is sent while it waits."""
        return bool(select.select([self.connection], [], [], 0)[0])


def _answer(engine, job: _Job) -> dict[str, Any]:
    """Do a job; whatever it raises becomes an answer, since the engine outlives a request."""
    operation = job.message.get("op")
    try:
        if job.deadline.passed:
            raise TimeoutError(f"the engine was busy for all of the {job.deadline.seconds:.0f} s")
        if operation == "generate":
            return {"ok": True} | engine.generate(job.message, job.deadline, job.gone)
        if operation in _CALLS:
            return {"ok": True} | (getattr(engine, operation)(*(job.message[name] for name in _CALLS[operation])) or {})
        return {"ok": False, "kind": "value", "error": f"unknown operation {operation!r}"}
    except WeightVersionError as error:
        return {"ok": False, "kind": "version", "error": str(error)}
    except (ValueError, TypeError, KeyError) as error:
        return {"ok": False, "kind": "value", "error": f"{error}"}
    except TimeoutError as error:
        return {"ok": False, "kind": "deadline", "error": str(error)}
    except Exception as error:  # vLLM's own, which has no one class: the client gets the sentence, the log everything
        traceback.print_exc()
        return {"ok": False, "kind": "engine", "error": f"{type(error).__name__}: {error}"}
