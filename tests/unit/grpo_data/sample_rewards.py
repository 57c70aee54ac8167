"""Reward functions that behave and misbehave, for test_reward_pool; each looks at the response to decide how."""

import asyncio
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time

NOT_A_FUNCTION = 3


def length(prompt, response, answer, extra):
    return len(response)


def misbehave(prompt, response, answer, extra):
    match response:
        case "sleep":
            time.sleep(1000)
        case "hold the interpreter lock":
            re.match(r"(a|a)+$", "a" * 60 + "b")
        case "ignore signals":
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            time.sleep(1000)
        case "start a child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
            with open(extra["pid_file"], "w") as file:
                file.write(str(child.pid))
            time.sleep(1000)
        case "raise":
            raise KeyError("no such thing")
        case "half a character":
            raise ValueError(b"\xff".decode(errors="surrogateescape"))
        case "exit":
            sys.exit(1)
        case "crash":
            os._exit(3)
        case "close everything, then crash":
            os.closerange(3, 256)
            time.sleep(0.3)
            os._exit(4)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "fork and return":
            if os.fork() == 0:
                return 99.0
            time.sleep(0.5)  # the child has its say before this process has
        case "fork and raise":
            if os.fork() == 0:
                raise KeyError("in the child")
            time.sleep(0.5)
        case "forge":
            frame = sys._getframe()
            while "connection" not in frame.f_locals:
                frame = frame.f_back
            forged = [("ok", 99.0, "")]
            frame.f_locals["connection"].send((os.getpid() + 1, frame.f_locals["number"], "done", forged))
            frame.f_locals["connection"].send((os.getpid(), frame.f_locals["number"] + 1, "done", forged))
        case "nan":
            return math.nan
        case "inf":
            return -math.inf
        case "huge":
            return 10**400
        case "text":
            return "1.0"
        case "none":
            return None
        case "list":
            return [1.0, 0.0]
        case "bool":
            return True
    return 1.0


def alarm(prompt, response, answer, extra):
    """What math-verify does for its own time limits: only the main thread may set a signal handler."""
    assert threading.current_thread() is threading.main_thread()
    fired = []
    signal.signal(signal.SIGALRM, lambda number, frame: fired.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(0.1)
    return float(len(fired))


def environment(prompt, response, answer, extra):
    """1.0 if the worker sees the variable that the response names."""
    return float(response in os.environ)


def loaded(prompt, response, answer, extra):
    """1.0 if the module that the response names has been imported in the worker."""
    return float(response in sys.modules)


async def coroutine(prompt, response, answer, extra):
    await asyncio.sleep(0)
    return 1.0


def too_few(response):
    return 1.0
