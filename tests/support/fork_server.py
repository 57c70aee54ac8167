"""A process that imports Megatron once and forks a copy of itself for each script, which runs as `python script` would.

`run_script` starts the server of this process when it is first needed. Importing costs ten seconds of processor time, more
than most scripts compute. A copy has the imports and nothing else of the scripts before it: no process group, no model, no
random state. All end with the process that started the server, however that ends.
"""

import atexit
import contextlib
import ctypes
import gc
import os
import runpy
import signal
import subprocess
import sys
import traceback
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


class _Server:
    """The client's end."""

    def __init__(self):
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1", "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore",
        }
        self.connection, other = Pipe()
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", str(other.fileno())], pass_fds=[other.fileno()],
                env=environment, cwd=REPOSITORY, start_new_session=True, preexec_fn=end_with_parent,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )
        atexit.register(self.end)

    def end(self) -> None:
        atexit.unregister(self.end)
        self.process.kill()
        self.process.wait()
        self.connection.close()


_server: _Server | None = None


def run_script(command: list[str], output: Path, seconds: float) -> int | None:
    """Run a script with its arguments, its output to a file; returns the exit code, None where time is up."""
    global _server
    if _server is None:
        _server = _Server()
    process = None
    try:
        _server.connection.send((command, str(output)))
        process = _server.connection.recv()
        if _server.connection.poll(seconds):
            return _server.connection.recv()
        os.killpg(process, signal.SIGKILL)
        _server.connection.recv()
        return None
    except BaseException:  # the server's next answer would be this script's: the next script gets another server
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
        _server.end()
        _server = None
        raise


def end_with_parent() -> None:
    """Ask the kernel to end this process when the one that started it ends, however it ends (prctl(2))."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)


def serve(connection: Connection) -> None:
    """For each script its process id, then its exit code, until the client is gone."""
    while True:
        try:
            command, output = connection.recv()
        except EOFError:
            return
        process = os.fork()
        if process == 0:
            connection.close()
            _become(command, output)
        connection.send(process)
        connection.send(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))


def _become(command: list[str], output: str) -> None:
    """Be the process of a script; does not return."""
    status = 1
    try:
        os.setsid()
        end_with_parent()
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.argv, sys.path[0] = command, str(Path(command[0]).parent)
        runpy.run_path(command[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def preload() -> None:
    """Import what most scripts import, and what torch, transformers and matplotlib import when they are first used."""
    import matplotlib.backends.backend_agg  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import torch.multiprocessing  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

    import megatron.grpo.train  # noqa: F401

    gc.freeze()  # all of this is here to stay: no collector of a copy walks it, nor copies its pages by that


if __name__ == "__main__":
    preload()
    serve(Connection(int(sys.argv[1])))
