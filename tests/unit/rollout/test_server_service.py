"""The server's socket without vLLM: who is let in, and answers to what no engine can do. The engine is one of this file."""

import math
import socket
import struct
import threading

import pytest

from longstraw.rollout.vllm_client import EngineError, VllmEngine
from longstraw.rollout.vllm_server import service as module
from longstraw.rollout.vllm_server.service import Service
from longstraw.rollout.wire import Deadline, WireError, receive_message, send_message

STATUS = {"weight_version": 0, "builds_on": [0]}


class OddEngine:
    """Answers with a log-probability that is no number."""

    def status(self):
        return STATUS

    def generate(self, message, deadline, gone):
        return {"groups": [[{"token_ids": [1], "logprobs": [math.nan], "finish_reason": "stop"}]], "cached_tokens": [0]}

    def checksums(self):
        return {"checksums": {"a": "b"}}


@pytest.fixture
def service(monkeypatch):
    """A running one. An exception that ends a thread is the test's failure."""
    ended = []
    monkeypatch.setattr(threading, "excepthook", ended.append)
    running = Service("127.0.0.1", "secret", end=lambda: None)
    for work in (running.accept, lambda: running.run(OddEngine())):
        threading.Thread(target=work, daemon=True).start()
    yield running
    assert not [hook.exc_value for hook in ended]


def ready(service: Service) -> dict:
    return {"host": "127.0.0.1", "port": service.port, "token": "secret", "pid": 1, "weight_version": 0}


def connect(service: Service) -> socket.socket:
    return socket.create_connection(("127.0.0.1", service.port), timeout=20)


def ask(connection: socket.socket, message: dict) -> dict | None:
    send_message(connection, message, Deadline(20))
    return receive_message(connection, Deadline(20))


def test_an_answer_that_is_no_number_is_said_and_the_connection_stays(service):
    with VllmEngine(ready(service)) as engine:
        with pytest.raises(EngineError, match="the engine's answer has what no message can: .*nan"):
            engine._call("generate", 20, {})
        assert engine.checksums() == {"a": "b"}


@pytest.mark.parametrize("message, words", [
    ({"op": "checksums", "deadline_seconds": "soon"}, "deadline_seconds must be a number"),
    ({"op": "checksums", "deadline_seconds": None}, "deadline_seconds must be a number"),
    ({"op": "checksums", "deadline_seconds": 10**400}, "deadline_seconds must be a number"),
    ({"op": [[]], "deadline_seconds": 1}, "op must be the name of an operation"),
    ({"op": "\ud800", "deadline_seconds": 1}, "unknown operation"),
])
def test_what_is_no_request_is_answered(service, message, words):
    with connect(service) as connection:
        assert ask(connection, {"token": "secret"})["ok"]
        answer = ask(connection, message)
        assert (answer["ok"], answer["kind"]) == (False, "value") and words in answer["error"]
        assert ask(connection, {"op": "status"})["ok"]


def test_a_token_that_is_no_text_is_a_wrong_one(service):
    with connect(service) as connection:
        assert ask(connection, {"token": "\ud800"}) == {"ok": False, "kind": "token", "error": "wrong token"}


def test_a_message_that_is_nested_deeply_ends_its_connection_alone(service):
    with connect(service) as connection, VllmEngine(ready(service)) as other:
        body = b'{"token":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
        assert ask(connection, {"token": "secret"})["ok"]
        connection.sendall(struct.pack(">Q", len(body)) + body)
        assert receive_message(connection, Deadline(20)) is None
        assert other.status()["state"] == "ready"
    left, right = socket.socketpair()
    with left, right:
        left.sendall(struct.pack(">Q", len(body)))
        threading.Thread(target=left.sendall, args=(body,)).start()
        with pytest.raises(WireError, match="not a message: nested too deeply"):
            receive_message(right, Deadline(20))


def test_silent_strangers_keep_nobody_out(service):
    strangers = [connect(service) for _ in range(module._MOST_STRANGERS + 6)]
    try:
        with VllmEngine(ready(service)) as engine:
            assert engine.status()["state"] == "ready"
        assert strangers[0].recv(1) == b"", "the oldest makes room"
    finally:
        for stranger in strangers:
            stranger.close()


def test_one_client_too_many_is_told_so_and_may_come_when_another_has_gone(service):
    clients = [VllmEngine(ready(service)) for _ in range(module._MOST_CLIENTS)]
    with pytest.raises(EngineError, match=f"it has {module._MOST_CLIENTS} clients already, and takes no more"):
        VllmEngine(ready(service))
    clients.pop().close()
    for _ in range(200):
        try:
            clients.append(VllmEngine(ready(service)))
            break
        except EngineError:
            threading.Event().wait(0.05)
    assert len(clients) == module._MOST_CLIENTS
    for client in clients:
        client.close()
