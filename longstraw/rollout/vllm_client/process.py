"""Start and end a vLLM server process.

    server = launch_server(["--model", folder, "--tensor-parallel-size", "2"], folder=scratch)
    wait_until_ready(server, seconds=600)
    with VllmEngine(server.ready_file) as engine:
        ...
    stop(server)

The server belongs to this process: it ends when this process does, however that ends. Its output goes to `server.log` in
`folder`.

Left out: other machines' ranks, which Ray starts.
"""

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from longstraw.rollout.lifetime import end_tree, list_shared_files, remove_files

_ROOT = Path(__file__).resolve().parents[3]
_LOG_LINES = 15


@dataclass(frozen=True)
class Server:
    """A server process, its ready file and its log."""

    process: subprocess.Popen
    ready_file: Path
    log: Path


def find_vllm_python() -> Path:
    """vLLM's interpreter: that of $LONGSTRAW_VLLM_VENV, or of .venv-vllm in the project's folder.

    Raises ValueError where there is none.
    """
    folder = Path(os.environ.get("LONGSTRAW_VLLM_VENV") or _ROOT / ".venv-vllm")
    python = folder / "bin" / "python"
    if not os.access(python, os.X_OK):
        raise ValueError(f"{folder} holds no environment of vLLM: make one with tools/setup_vllm.sh, or set LONGSTRAW_VLLM_VENV.")
    return python


def server_command(flags: Sequence[str], ready_file: Path, *, owner_pid: int) -> list[str]:
    """The command line of a server. Raises as `find_vllm_python`."""
    own = ["--ready-file", str(ready_file), "--owner-pid", str(owner_pid)]
    return [str(find_vllm_python()), "-m", "longstraw.rollout.vllm_server", *flags, *own]


def server_environment() -> dict[str, str]:
    """The environment of a server: this process's, but for what is meant for this process's own interpreter."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "VIRTUAL_ENV")}
    return environment | {"PYTHONPATH": str(_ROOT)}


def launch_server(flags: Sequence[str], *, folder: str | Path, owner_pid: int | None = None) -> Server:
    """Start a server, in a session of its own, with the ready file and the log in `folder`. Does not wait.

    owner_pid: the process whose end is the server's; by default this one.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    ready_file, log = folder / "ready.json", folder / "server.log"
    ready_file.unlink(missing_ok=True)
    with open(log, "w") as output:
        process = subprocess.Popen(
            server_command(flags, ready_file, owner_pid=owner_pid or os.getpid()), env=server_environment(), stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True, cwd=_ROOT,
        )
    return Server(process, ready_file, log)


def wait_until_ready(server: Server, *, seconds: float) -> None:
    """Return when the server answers.

    Raises RuntimeError, with the end of its log, where it has ended or is not ready in time (it is ended then).
    """
    late = time.monotonic() + seconds
    while not server.ready_file.exists():
        code = server.process.poll()
        if code is not None or time.monotonic() > late:
            stop(server)
            what = f"is not ready after {seconds:.0f} s" if code is None else f"ended with exit code {code}"
            raise RuntimeError(f"the rollout server {what}; the end of {server.log}:\n{_tail(server.log)}")
        time.sleep(0.05)


def stop(server: Server, *, grace: float = 15.0) -> int:
    """End a server and everything below it; returns its exit code. Nothing of it is left: also not where it was killed."""
    try:
        below = psutil.Process(server.process.pid).children(recursive=True)
        shared = list_shared_files([psutil.Process(server.process.pid), *below])
    except psutil.NoSuchProcess:
        below, shared = [], set()
    if server.process.poll() is None:
        server.process.terminate()
        try:
            server.process.wait(grace)
        except subprocess.TimeoutExpired:
            server.process.kill()
    code = server.process.wait()
    end_tree(below, grace=0.0)
    remove_files(shared)
    server.ready_file.unlink(missing_ok=True)
    return code


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
