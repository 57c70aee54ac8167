"""Two sides that start in milliseconds, for tests of the switcher: real processes with ranks, workers, ports, shared
memory and files on disk, and nothing of ours in them.

    python -I -S quick_sides.py trainer|exporter|server|generator RUN_DIR STEP

The state that the trainer moves is a hash: step K makes hash(state, rollouts of step K). Rollouts are random bytes. So
the last state can be worked out from the rollouts on the disk, and any step that was taken twice, left out or taken on
other rollouts shows. A program stays in a phase as long as RUN_DIR/hold-PHASE-STEP is there, to be caught in it.
Standard library only.
"""

import hashlib
import json
import mmap
import os
import secrets
import signal
import socket
import sys
import time
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """A reader sees the whole file or none."""
    partial = path.with_name(path.name + ".new")
    partial.write_text(text)
    os.replace(partial, path)


def take_step(state: str, rollouts: str) -> str:
    """The state after a step."""
    return hashlib.sha256((state + rollouts).encode()).hexdigest()


def read_checkpoint(folder: Path) -> dict:
    """The latest checkpoint; of step 0 where there is none."""
    path = folder / "checkpoint.json"
    return json.loads(path.read_text()) if path.exists() else {"step": 0, "state": "initial"}


def pass_through(folder: Path, phase: str, step: int) -> None:
    """Stay in a phase for a moment, and as long as a test holds it; `at-PHASE-STEP` says that it has been reached. With
    `refuse-PHASE-STEP` end as a program does that refuses its flags, and say one thing more, as launchers do."""
    if (folder / f"refuse-{phase}-{step}").exists():
        print("quick: error: no such flag\nlaunch: rank 0 exited with 2", file=sys.stderr, flush=True)
        os._exit(2)
    time.sleep(0.02)
    while (folder / f"hold-{phase}-{step}").exists():
        (folder / f"at-{phase}-{step}").touch()
        time.sleep(0.02)


def fork(work) -> int:
    """Start a child that does `work`; returns its id."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return child


def train(folder: Path, step: int) -> None:
    """Two ranks; the first one commits, exports, and ends a little later. A rank that dies takes the launch with it."""
    shared = hold_shared_memory(folder, "trainer")
    ranks = [fork(lambda: first_rank(folder, step)), fork(lambda: time.sleep(3600))]
    ended, status = os.wait()
    if ended == ranks[0] and status == 0:
        os.kill(ranks[1], signal.SIGKILL)
        os.unlink(shared)
        sys.exit(0)
    sys.exit(os.waitstatus_to_exitcode(status) or 1)


def first_rank(folder: Path, step: int) -> None:
    """Take the step unless it is committed; write its weights unless they are there."""
    checkpoint = read_checkpoint(folder)
    pass_through(folder, "training", step)
    if checkpoint["step"] == step - 1:
        rollouts = (folder / f"rollouts-{step}").read_text()
        checkpoint = {"step": step, "state": take_step(checkpoint["state"], rollouts)}
        write_whole(folder / "checkpoint.json", json.dumps(checkpoint))
    elif checkpoint["step"] != step:
        sys.exit(f"asked for step {step} at {checkpoint['step']}")
    pass_through(folder, "exporting", step)
    write_whole(folder / f"version-{step}", checkpoint["state"])
    pass_through(folder, "draining", step)


def hold_shared_memory(folder: Path, name: str) -> str:
    """A file in /dev/shm that is mapped, as libraries for exchange between processes make it."""
    path = f"/dev/shm/quick-{name}-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.ftruncate(descriptor, 1 << 20)
    global held
    held = mmap.mmap(descriptor, 1 << 20)
    held[:] = b"x" * (1 << 20)
    os.close(descriptor)
    with open(folder / "shared-memory", "a") as file:
        file.write(path + "\n")
    return path


def serve(folder: Path, step: int) -> None:
    """A port, a ready file and a worker in a session of its own; ends on SIGTERM, and with its worker."""
    version = step - 1
    weights = "initial" if version == 0 else (folder / f"version-{version}").read_text()
    shared = hold_shared_memory(folder, "server")
    received = []
    signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    worker = fork(lambda: (os.setsid(), signal.signal(signal.SIGTERM, signal.SIG_DFL), time.sleep(3600)))
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(0.05)
    pass_through(folder, "rollout_up", step)
    port = server.getsockname()[1]
    write_whole(folder / "ready.json", json.dumps({"port": port, "pid": os.getpid(), "weight_version": version}))
    with open(folder / "ports", "a") as file:
        file.write(f"{port}\n")
    while not received:
        if os.waitpid(worker, os.WNOHANG)[0]:
            sys.exit("the worker is gone")
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        with connection:
            connection.sendall(weights.encode())
    pass_through(folder, "rollout_down", step)
    os.unlink(folder / "ready.json")
    os.unlink(shared)
    os.kill(worker, signal.SIGTERM)


def generate(folder: Path, step: int) -> None:
    """Rollouts of a step, unless they are there."""
    path = folder / f"rollouts-{step}"
    if path.exists():
        sys.exit(f"{path} would be made again")
    ready = json.loads((folder / "ready.json").read_text())
    with socket.create_connection(("127.0.0.1", ready["port"])) as connection:
        weights = connection.makefile().read()
    pass_through(folder, "generating", step)
    write_whole(path, f"{secrets.token_hex(16)} by {weights}")
    pass_through(folder, "generated", step)


if __name__ == "__main__":
    if sys.argv[2] == "other":
        time.sleep(3600)
    program = {"trainer": train, "exporter": train, "server": serve, "generator": generate}[sys.argv[1]]
    program(Path(sys.argv[2]), int(sys.argv[3]))
