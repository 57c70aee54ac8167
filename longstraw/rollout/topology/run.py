"""A switcher's process on one host: lock, token, hosts, journal, signals and exit status around the state machine.

    RUN_DIR/switch/journal.jsonl      what happened, a line a state
    RUN_DIR/switch/token              keeps strangers from the hosts' channel; readable by its owner alone
    RUN_DIR/switch/port               of the first host's switcher, where the others find it
    RUN_DIR/switch/node-0.json        what runs on a host, for the next switcher to end
    RUN_DIR/switch/node-0.lock        one switcher a host and run
    RUN_DIR/switch/logs/              one file a program, step and host
"""

import secrets
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from longstraw.durable_files import write_whole
from longstraw.rollout.topology.command import Command
from longstraw.rollout.topology.config import DeadlineConfig
from longstraw.rollout.topology.crew import Crew
from longstraw.rollout.topology.follower import clear_host, follow
from longstraw.rollout.topology.gathering import find_interface, gather_followers, join_leader
from longstraw.rollout.topology.hosts import HostLost, LocalHost, RemoteHost, StopAsked
from longstraw.rollout.topology.journal import Journal
from longstraw.rollout.topology.keeper import PR_SET_CHILD_SUBREAPER, set_process_option
from longstraw.rollout.topology.lock import RunLock
from longstraw.rollout.topology.machine import GaveUp, Machine
from longstraw.rollout.topology.node import LocalNode
from longstraw.rollout.topology.stages import Job

DONE, FAILED, REFUSED, STOPPED = 0, 1, 2, 75
"""Exit statuses. 2: a program of the run has refused its flags. 75 (EX_TEMPFAIL): stopped by a signal, everything saved;
the same command goes on from there."""

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a host stands among the hosts of a run."""

    rank: int = 0
    count: int = 1
    leader: str = LOOPBACK
    """Address of the first host, at which the others reach it."""

    address: str = LOOPBACK
    """This host's own address on the way there."""

    interface: str = "lo"
    """Network interface of that address; "" where none is found."""


Build = Callable[[str, int, tuple[int, ...]], Command]


def run_switch(
    make_job: Callable[[Site], Job], make_build: Callable[[Site], Build], folder: Path, deadlines: DeadlineConfig, *,
    rank: int = 0, count: int = 1, rendezvous: tuple[str, int] | None = None, fingerprint: str = "",
) -> int:
    """Run this host's switcher to its end; returns the exit status. Call it in the main thread of a process of its own.

    make_job, make_build: the job (first host) and the commands (every host), once the host's place is known. folder:
    RUN_DIR/switch, on a file system that all hosts share. fingerprint: of the flags that must be the same on every
    host.
    """
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda received, _frame: signals.append(received))
    set_process_option(PR_SET_CHILD_SUBREAPER, 1)

    def say(text: str) -> None:
        print(f"switch: node-{rank}: {text}", file=sys.stderr, flush=True)

    try:
        lock = RunLock(folder / f"node-{rank}.lock")
        try:
            if rank == 0:
                return _lead(make_job, make_build, folder, deadlines, count, rendezvous, fingerprint, signals, say)
            return _follow(make_build, folder, deadlines, rank, count, rendezvous, fingerprint, signals)
        finally:
            lock.release()
    except StopAsked:
        return STOPPED
    except (HostLost, GaveUp, ValueError, RuntimeError, OSError) as error:
        say(str(error))
        return _choose_status(error)


def _lead(make_job, make_build, folder, deadlines, count, rendezvous, fingerprint, signals, say) -> int:
    site = Site() if count == 1 else _find_site(resolve(rendezvous[0]), rendezvous, 0, count)
    job, journal = make_job(site), Journal(folder / "journal.jsonl")
    node = _make_node(make_build(site), folder, 0)
    followers: list[RemoteHost] = []
    status = FAILED
    journal.write("start", hosts=count, last_step=job.last_step)
    try:
        if count > 1:
            say(f"waiting for {count - 1} other hosts at {rendezvous[0]}")
            followers += gather_followers(
                rendezvous, count, folder / "token", fingerprint, node_timeout=deadlines.node_timeout,
                seconds=deadlines.rendezvous_seconds, stop_asked=lambda: bool(signals),
            )
        crew = Crew([LocalHost("node-0", node), *followers])
        Machine(job, crew, journal, deadlines, signals=lambda: len(signals), say=say).run()
        status = DONE
    except StopAsked:
        status = STOPPED
    except Exception as error:
        status = _choose_status(error)
        journal.write("lost" if isinstance(error, HostLost) else "gave_up", reason=str(error))
        raise
    finally:
        for host in followers:  # before this host is cleared, which may take longer than they wait in silence
            try:
                host.leave(status)
            except HostLost as error:
                say(str(error))
        held = clear_host(node, deadlines.draining_seconds)
        if held:
            say(f"still there: {'; '.join(held)}")
        journal.write("end", status=status)
        journal.close()
    return status


def _follow(make_build, folder, deadlines, rank, count, rendezvous, fingerprint, signals) -> int:
    # What an earlier switcher left here ends before the leader is reached, which may never come.
    early = _make_node(make_build(Site(rank=rank, count=count)), folder, rank)
    clear_host(early, deadlines.draining_seconds)
    channel, address = join_leader(
        rendezvous, rank, folder / "token", fingerprint, seconds=deadlines.rendezvous_seconds,
        stop_asked=lambda: bool(signals),
    )
    node = _make_node(make_build(_find_site(address, rendezvous, rank, count)), folder, rank)
    try:
        return follow(
            node, channel, node_timeout=deadlines.node_timeout, clear_seconds=deadlines.draining_seconds,
            stop_asked=lambda: bool(signals),
        )
    finally:
        channel.close()


def _choose_status(error: Exception) -> int:
    return REFUSED if isinstance(error, GaveUp) and error.refused else FAILED


def resolve(host: str) -> str:
    """An address of a name. Raises ValueError where it has none."""
    try:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except socket.gaierror as error:
        raise ValueError(f"--rendezvous {host} has no address: {error}") from None


def _find_site(address: str, rendezvous: tuple[str, int], rank: int, count: int) -> Site:
    return Site(
        rank=rank, count=count, leader=rendezvous[0], address=address, interface=find_interface(address),
    )


def _make_node(build: Build, folder: Path, rank: int) -> LocalNode:
    """This host's node, under the mark that the run has on this host."""
    path = folder / f"node-{rank}.mark"
    if not path.exists():
        write_whole(path, secrets.token_hex(16) + "\n")
    return LocalNode(build=build, mark=path.read_text().strip(), record=folder / f"node-{rank}.json", adopts=True)
