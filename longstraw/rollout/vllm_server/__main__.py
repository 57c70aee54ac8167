"""Start vLLM, answer on a socket, and end without a trace.

    PYTHONPATH=. .venv-vllm/bin/python -m longstraw.rollout.vllm_server --model DIR --ready-file PATH [flags]

The main thread waits for the end: SIGTERM, SIGINT, the owner's death, or a client that asks for it. A second thread owns the
engine, a third accepts connections. Exit codes: 0 at an end that was asked for; 1 where the engine could not start, or one of
its workers has ended; 2 for flags that cannot be run, or not with this model.
"""

import json
import os
import secrets
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil

from longstraw.rollout.lifetime import end_tree, list_shared_files, remove_files, wait_for_end
from longstraw.rollout.vllm_server.flags import ServerConfig, parse_config

_GRACE_SECONDS = 2.0


def set_environment(config: ServerConfig) -> None:
    """vLLM's settings that are environment variables, before it is imported; one that is set already wins, but where it
    would open the process to others."""
    os.environ.update(
        VLLM_HOST_IP=config.bind_address, VLLM_ALLOW_INSECURE_SERIALIZATION="0", VLLM_NO_USAGE_STATS="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1",
    )
    for name, value in {
        "VLLM_CPU_KVCACHE_SPACE": f"{config.kv_cache_gib:g}", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING", "GLOO_SOCKET_IFNAME": "lo" if config.bind_address.startswith("127.") else "",
    }.items():
        if value:
            os.environ.setdefault(name, value)


def write_ready_file(path: Path, content: dict) -> None:
    """Write it whole, readable by its owner alone."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w") as file:
        json.dump(content, file)
    os.replace(partial, path)


def main() -> int:
    """The program; returns the exit code."""
    config = parse_config(needs_model=True)
    ready_file = Path(config.ready_file)
    asked, ask = os.pipe()
    os.set_blocking(ask, False)
    failures: list[str] = []
    status = 1

    def end() -> None:
        os.write(ask, b".")

    signal.signal(signal.SIGTERM, lambda *_: end())
    signal.signal(signal.SIGINT, lambda *_: end())
    set_environment(config)

    def fail(sentence: str) -> None:
        failures.append(sentence)
        end()

    def run() -> None:
        nonlocal status
        late = threading.Timer(config.start_seconds, fail, [f"the engine has not loaded in {config.start_seconds:.0f} s"])
        late.daemon = True
        late.start()
        try:
            from longstraw.rollout.vllm_server.engine import Engine, UnfitFlagsError
            from longstraw.rollout.vllm_server.service import Service

            try:
                engine = Engine(config)  # first: its workers must not inherit the socket
            except UnfitFlagsError:
                status = 2  # of no use to try again
                raise
            token = secrets.token_hex(32)
            service = Service(config.bind_address, token, end=end)
            threading.Thread(target=service.accept, daemon=True).start()
            threading.Thread(target=watch_workers, args=(fail,), daemon=True).start()
            late.cancel()
            write_ready_file(ready_file, {
                "host": config.bind_address, "port": service.port, "token": token, "pid": os.getpid(),
                "weight_version": engine.weights.version,
            })
            service.run(engine)
        except BaseException as error:
            traceback.print_exc()
            fail(f"{type(error).__name__}: {error}")

    threading.Thread(target=run, daemon=True).start()
    reason = wait_for_end(config.owner_pid, asked)
    failure = failures[0] if failures else ""
    ready_file.unlink(missing_ok=True)
    print(f"vllm_server: ending: {failure or reason}", file=sys.stderr, flush=True)
    itself = psutil.Process()
    shared = list_shared_files([itself])
    end_tree(itself.children(), grace=_GRACE_SECONDS)
    remove_files(shared)
    os._exit(status if failure else 0)  # vLLM's threads need not agree


def watch_workers(fail: Callable[[str], None]) -> None:
    """Call `fail` when one of this process's workers ends: without it the engine can do nothing more."""
    descriptors = {os.pidfd_open(process.pid): process.pid for process in psutil.Process().children()}
    if descriptors:
        ended, _, _ = select.select(list(descriptors), [], [])
        fail(f"worker {descriptors[ended[0]]} has ended")


if __name__ == "__main__":
    sys.exit(main())
