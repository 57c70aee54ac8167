"""Starts a program on this machine's ranks with torchrun and answers for how it ends.

    tools/launch.sh --nproc-per-node 2 -m megatron.grpo.train --model-preset tiny-qwen3.6 ...
    tools/launch.sh script.py ...

What it adds to torchrun:
- on one machine the rendezvous port is asked from the system, so launches never collide;
- on several machines it reads NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT (run it once on each);
- thread counts and the like are set for the hardware, unless the caller has set them;
- when one rank dies, the others get `--failure-seconds` to end, then everything is killed, and the exit status is that
  of the first rank that failed (128 + n for signal n);
- SIGTERM, SIGINT and SIGHUP reach every rank as SIGTERM, once. The ranks have `--grace-seconds` to finish or roll back
  their step and save; a second signal ends the wait. The exit status is 0 if every rank then ended with 0;
- nothing that a rank started outlives the launch;
- a program given --dry-run has one process and no torchrun: it stands for one of the ranks of all machines (WORLD_SIZE).

Left out: restarts (`--max-restarts 0`; a run goes on from its checkpoint) and stopping other machines (`srun
--kill-on-bad-exit=1` does). Linux only. No torch is imported here.
"""

import argparse
import ctypes
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import launch_rank

PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.1
LINGER_SECONDS = 1.0
KILL_SECONDS = 10.0


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Reads the launcher's own flags; everything from the program's name on belongs to the program."""
    parser = argparse.ArgumentParser(prog="launch", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc-per-node", type=int, default=None,
                        help="ranks on this machine (default: one for each GPU, or 1 without any)")
    parser.add_argument("--grace-seconds", type=float, default=120.0,
                        help="time the ranks have to save after SIGTERM or SIGINT (default: %(default)s)")
    parser.add_argument("--failure-seconds", type=float, default=5.0,
                        help="time the other ranks have to end once one has failed (default: %(default)s)")
    parser.add_argument("--log-dir", type=Path, default=None,
                        help="folder for one file a rank, rank-00001.log and so on, added to; the first rank of each machine "
                        "still writes here (default: all ranks do)")
    parser.add_argument("-m", "--module", action="store_true", help="the program is a module, as in python -m")
    parser.add_argument("program", help="module or script to run on every rank")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own arguments")
    args = parser.parse_args(argv)
    if args.nproc_per_node is not None and args.nproc_per_node < 1:
        parser.error(f"--nproc-per-node must be at least 1, not {args.nproc_per_node}")
    for flag, seconds in (("--grace-seconds", args.grace_seconds), ("--failure-seconds", args.failure_seconds)):
        if not (math.isfinite(seconds) and seconds >= 0):
            parser.error(f"{flag} must be a finite number and not negative, not {seconds:g}")
    return args


def count_gpus(environ: Mapping[str, str]) -> int:
    """Number of GPUs that a rank started with `environ` would see."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        return len([device for device in environ["CUDA_VISIBLE_DEVICES"].split(",") if device.strip() not in ("", "-1")])
    if shutil.which("nvidia-smi") is None:
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines()) if listing.returncode == 0 else 0


def choose_environment(environ: Mapping[str, str], ranks: int, gpus: int, cores: int) -> dict[str, str]:
    """`environ` with what the hardware asks for added; what the caller has set stands."""
    chosen = {"OMP_NUM_THREADS": str(max(1, min(cores // ranks, 8)))}
    if gpus:
        # Sequence and context parallelism rely on kernels being issued in one order (Megatron checks this).
        chosen["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    else:
        # Compiling takes 10-20 s at each launch and gains nothing on a CPU at these sizes.
        chosen["TORCH_COMPILE_DISABLE"] = "1"
    return chosen | dict(environ)


def choose_rendezvous(environ: Mapping[str, str]) -> list[str]:
    """torchrun's rendezvous flags for one machine, or for NNODES of them.

    Raises:
        ValueError: a variable is no number or out of its range, or NNODES is above 1 and one that says who this machine
            is, or where the first is, is missing.
    """
    nodes = read_number(environ, "NNODES") if "NNODES" in environ else 1
    if nodes < 1:
        raise ValueError(f"NNODES={nodes}: the number of machines must be at least 1")
    if nodes == 1:
        return ["--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0",
                "--rdzv-id", uuid.uuid4().hex, "--local-addr", "127.0.0.1"]
    missing = [name for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing:
        raise ValueError(f"NNODES={nodes} needs NODE_RANK, MASTER_ADDR and MASTER_PORT in the environment of each machine; "
                         f"missing here: {', '.join(missing)}")
    if not 0 < read_number(environ, "MASTER_PORT") < 65_536:
        raise ValueError(f"MASTER_PORT={environ['MASTER_PORT']} is no port: it must lie between 1 and 65535")
    if not 0 <= read_number(environ, "NODE_RANK") < nodes:
        raise ValueError(f"NODE_RANK={environ['NODE_RANK']} does not number one of NNODES={nodes} machines")
    return ["--nnodes", str(nodes), "--node-rank", environ["NODE_RANK"],
            "--master-addr", environ["MASTER_ADDR"], "--master-port", environ["MASTER_PORT"]]


def read_number(environ: Mapping[str, str], name: str) -> int:
    """A whole number from the environment. Raises ValueError that names the variable."""
    try:
        return int(environ[name])
    except ValueError:
        raise ValueError(f"{name}={environ[name]} is not a whole number") from None


def list_descendants(ancestor: int) -> list[int]:
    """Process ids below `ancestor`, from one reading of /proc."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                # The command's name stands in parentheses and may hold anything; the parent is the 2nd field after it.
                parents[int(entry)] = int(Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue  # ended while the list was read
    found, frontier = [], {ancestor}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier}
        found.extend(frontier)
    return found


def kill_descendants() -> int:
    """Kills everything below this process, and what that starts meanwhile; returns how many processes it hit."""
    hit: set[int] = set()
    deadline = time.monotonic() + KILL_SECONDS
    while pids := list_descendants(os.getpid()):
        if time.monotonic() > deadline:
            report(f"processes {pids} do not end on SIGKILL (stuck in the kernel, often on a device); leaving them")
            break
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
                hit.add(pid)
            except ProcessLookupError:
                pass
        time.sleep(0.02)
        reap_orphans()
    return len(hit)


def reap_orphans() -> None:
    """Collects ended processes that the kernel handed to this one when their own parents died."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


class Launch:
    """One torchrun agent, the ranks below it, and the signals and failures that came in."""

    def __init__(self, directory: Path, grace_seconds: float, failure_seconds: float):
        self.directory = directory
        self.grace_seconds = grace_seconds
        self.failure_seconds = failure_seconds
        self.signals: list[int] = []
        self.told: set[int] = set()
        self.deadline: float | None = None

    def note_signal(self, signum: int, _frame) -> None:
        self.signals.append(signum)

    def first_failure(self) -> tuple[int, int] | None:
        """(rank, status) of the rank that first ended with a status other than 0."""
        failures = []
        for record in self.directory.glob("*.exit"):
            moment, status = record.read_text().split()
            if int(status):
                failures.append((float(moment), int(record.stem), int(status)))
        return min(failures)[1:] if failures else None

    def tell_ranks_to_stop(self, agent: subprocess.Popen) -> None:
        """Sends SIGTERM to each rank that has started and has not had it yet."""
        ranks = [int(record.read_text()) for record in self.directory.glob("*.pid")]
        if not ranks:
            agent.terminate()
        for pid in ranks:
            if pid not in self.told:
                self.told.add(pid)
                try:
                    os.kill(pid, signal.SIGTERM)
                except ProcessLookupError:
                    pass

    def shorten_deadline(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self.deadline = deadline if self.deadline is None else min(self.deadline, deadline)

    def watch(self, agent: subprocess.Popen) -> None:
        """Returns once the agent has ended, or its time is up after a signal or a failure."""
        stopping, failed = False, False
        while agent.poll() is None:
            if self.signals and not stopping:
                stopping = True
                self.shorten_deadline(self.grace_seconds)
                report(f"{signal.Signals(self.signals[0]).name}: the ranks have {self.grace_seconds:g} s to save and end")
            if stopping:
                self.tell_ranks_to_stop(agent)
            if not failed and (failure := self.first_failure()):
                failed = True
                self.shorten_deadline(self.failure_seconds)
                report(f"rank {failure[0]} {describe_status(failure[1])}; stopping the others")
            if self.deadline is not None and (time.monotonic() > self.deadline or len(self.signals) > 1):
                report("time is up: killing what is left")
                return
            time.sleep(POLL_SECONDS)

    def exit_status(self, agent: subprocess.Popen, killed: bool) -> int:
        if failure := self.first_failure():
            return failure[1]
        if killed or agent.returncode < 0:
            return 128 + (self.signals[0] if self.signals else signal.SIGKILL)
        return agent.returncode


def start_dry_run(args: argparse.Namespace, command: list[str], environ: dict[str, str]) -> None:
    """Becomes the program, told how many ranks there would be. Raises ValueError where NNODES is no number."""
    nodes = read_number(environ, "NNODES") if "NNODES" in environ else 1
    os.execve(command[0], command, environ | {"WORLD_SIZE": str(args.nproc_per_node * nodes)})


def report(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)


def describe_status(status: int) -> str:
    return f"was ended by {signal.Signals(status - 128).name}" if 128 < status < 128 + signal.NSIG else f"exited with {status}"


def run_ranks(args: argparse.Namespace, command: list[str], environ: dict[str, str]) -> int:
    """Runs torchrun and everything below it; returns the exit status when nothing of it is left."""
    if launch_rank.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")

    def end_with_launcher() -> None:
        launch_rank.libc.prctl(launch_rank.PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    with tempfile.TemporaryDirectory(prefix="longstraw-launch-") as directory:
        launch = Launch(Path(directory), args.grace_seconds, args.failure_seconds)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, launch.note_signal)
        if args.log_dir is not None:
            args.log_dir.mkdir(parents=True, exist_ok=True)
            environ = environ | {launch_rank.LOG_DIR: str(args.log_dir.resolve())}
        rank_command = [sys.executable, "-I", "-S", launch_rank.__file__, directory, *command]
        agent = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *choose_rendezvous(environ), "--max-restarts", "0",
             "--nproc-per-node", str(args.nproc_per_node), "--no-python", *rank_command],
            env=environ | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(args.grace_seconds))},
            start_new_session=True, preexec_fn=end_with_launcher)
        launch.watch(agent)
        killed = agent.poll() is None
        deadline = time.monotonic() + (0 if killed else LINGER_SECONDS)
        while list_descendants(os.getpid()) and time.monotonic() < deadline:
            reap_orphans()
            time.sleep(POLL_SECONDS)
        left = kill_descendants()
        if left and not killed:
            report(f"killed {left} processes that the ranks had left behind")
        return launch.exit_status(agent, killed)


def main(argv: list[str]) -> int:
    args = parse_arguments(argv)
    gpus, dry = count_gpus(os.environ), "--dry-run" in args.arguments
    args.nproc_per_node = args.nproc_per_node or gpus or 1
    if 0 < gpus < args.nproc_per_node and not dry:
        raise ValueError(f"--nproc-per-node {args.nproc_per_node} asks for more ranks than this machine has GPUs ({gpus}); "
                         "set CUDA_VISIBLE_DEVICES= to run on the CPU")
    environ = choose_environment(os.environ, 1 if dry else args.nproc_per_node, gpus, len(os.sched_getaffinity(0)))
    command = [sys.executable, *(["-m"] if args.module else []), args.program, *args.arguments]
    if dry:
        start_dry_run(args, command, environ)
    return run_ranks(args, command, environ)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        sys.exit(f"launch: {error}")
