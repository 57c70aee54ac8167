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
_MOST_CONNECTIONS = 16

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
        self._places = threading.BoundedSemaphore(_MOST_CONNECTIONS)

    def accept(self) -> None:
        """Serve connections, a thread each; never returns."""
        while True:
            connection, _ = self.listener.accept()
            if not self._places.acquire(blocking=False):
                connection.close()
                continue
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
                if not self._greet(connection):
                    return
                while (message := receive_message(connection, Deadline(float("inf")))) is not None:
                    send_message(connection, self._dispatch(connection, message), Deadline(_ANSWER_SECONDS))
        except WireError:
            pass  # the client is gone: there is nobody to tell
        finally:
            self._places.release()

    def _greet(self, connection: socket.socket) -> bool:
        deadline = Deadline(_GREETING_SECONDS)
        message = receive_message(connection, deadline, longest=LONGEST_GREETING) or {}
        known = hmac.compare_digest(str(message.get("token", "")).encode(), self.token.encode())
        answer = {"ok": True} | self._status() if known else {"ok": False, "kind": "token", "error": "wrong token"}
        send_message(connection, answer, deadline)
        return known

    def _status(self) -> dict[str, Any]:
        return self.state | {"pid": os.getpid()}

    def _dispatch(self, connection: socket.socket, message: dict[str, Any]) -> dict[str, Any]:
        operation = message.get("op")
        if operation == "status":
            return {"ok": True} | self._status()
        if operation == "stop":
            self.end()
            return {"ok": True}
        job = _Job(message, Deadline(float(message.get("deadline_seconds", 0.0))), connection)
        self._jobs.put(job)
        job.done.wait()
        return job.answer


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
