"""The child process that calls reward functions, one sample at a time, for `reward_pool`.

It is started as a fresh Python, so it holds none of the trainer's memory, sockets or process groups. It dies with
the trainer: by the kernel's parent-death signal, which also reaches a function stuck in C code, and at the end of
its pipe. Processes that a reward function starts belong to the worker's process group, and go when the pool kills
it; only if the trainer itself is killed do they outlive it.

Left out: limits on memory and network, and any sandbox. A reward function is trusted code.
"""

import ctypes
import math
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from numbers import Real
from typing import Any

from megatron.grpo.reward_functions import RewardFunction, resolve_reward

PR_SET_PDEATHSIG = 1
START = 0
"""Number of the messages that belong to no sample; samples count from 1."""
MESSAGE_LIMIT = 2000
"""Longest message kept of one failure, in characters."""


def serve(fd: int, parent_pid: int, names: list[str]) -> None:
    """Answer samples on the connection `fd` until it closes.

    A message is (process id, sample number, kind, payload). First comes "ready" or "refused" with a sentence, under
    the number START. Then for each (number, (prompt, response, answer, extra)) received: "begin" with i before each
    function i, and "done" with one (status, value, message) a function.
    """
    os.set_inheritable(fd, False)
    _die_with_parent(parent_pid)
    # Slurm sends SIGTERM to all processes of a step while the trainer still finishes it, and needs its rewards. A
    # handler, unlike SIG_IGN, is not passed on to programs that a reward function starts.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    own_pid = os.getpid()
    with Connection(fd) as connection:

        def send(number: int, kind: str, payload: Any = None) -> None:
            if os.getpid() != own_pid:  # a fork that came back out of a reward function, or of its import
                os._exit(1)
            try:
                connection.send((own_pid, number, kind, payload))
            except ConnectionError:
                sys.exit(0)  # the pool has closed its end, and wants no answers any more

        try:
            functions = [resolve_reward(name) for name in names]
        except ValueError as error:
            send(START, "refused", str(error))
            return
        send(START, "ready")
        while True:
            try:
                number, sample = connection.recv()
            except (EOFError, ConnectionError):
                return  # closed, or closed with messages of ours that nobody has read, which resets the connection
            outcomes = []
            for index, function in enumerate(functions):
                send(number, "begin", index)
                status, value, message = call_reward(names[index], function, sample)
                # A lone surrogate in a message, as of bytes that were no text, could not be stored.
                outcomes.append((status, value, message.encode(errors="backslashreplace").decode()))
            send(number, "done", outcomes)


def call_reward(
    name: str, function: RewardFunction, sample: tuple[str, str, str, dict[str, Any]]
) -> tuple[str, float | None, str]:
    """Call one function and judge what it returns.

    Returns:
        ("ok", value, ""), ("error", None, message) where it raised, or ("invalid", None, message) where it returned
        something other than one finite number.
    """
    try:
        value = function(*sample)
    # BaseException: sys.exit() in a reward, or math-verify's own timeout, is a failed sample, not a dead worker.
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        return "error", None, f"reward {name} raised {type(error).__name__}: {error}{where}"[:MESSAGE_LIMIT]
    if isinstance(value, (list, tuple)):
        return "invalid", None, f"reward {name} returned a {type(value).__name__} of {len(value)}, not one number"
    if not isinstance(value, Real):
        return "invalid", None, f"reward {name} returned a {type(value).__name__}, not one number"
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        return "invalid", None, f"reward {name} returned {number}, not a finite number"
    return "ok", number, ""


def _die_with_parent(parent_pid: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed; reward workers need Linux")
    if os.getppid() != parent_pid:  # the parent died before the request took effect
        os._exit(1)
