"""The trainer's flags are checked by the trainer itself before anything is started: every program of the run that is
`megatron.grpo.train`, in one process beside the switcher, which never imports Megatron. It takes the time of that import.
"""

import json
import subprocess
import sys

from megatron.grpo.topology.commands import Commands

PROGRAM = "megatron.grpo.train"
ROLES = ("trainer", "exporter", "generator")
_STEP = 1


class CheckFailed(RuntimeError):
    """The check itself could not be made."""


def list_refusals(commands: Commands, *, elsewhere: bool) -> list[str]:
    """What the trainer's own parser has against the command lines of the run, a sentence each.

    elsewhere: the run is for other hosts than this one (--plan). Raises CheckFailed.
    """
    lines = {role: {"flags": list_program_flags(commands, role), "ranks": count_ranks(commands, role)} for role in ROLES}
    environment = commands.build("generator", _STEP, ()).environment
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "megatron.grpo.flag_check"], env=dict(environment), text=True, capture_output=True,
        input=json.dumps({"lines": lines, "elsewhere": elsewhere}),
    )
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
        if done.returncode == 0:
            # One flag of the three programs is one mistake.
            return list(dict.fromkeys(sentence for role in ROLES for sentence in answer[role]))
    except (IndexError, ValueError, KeyError):
        pass  # said below
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    raise CheckFailed(f"the trainer's flags could not be checked: it ended with status {done.returncode}: {last}")


def list_program_flags(commands: Commands, role: str) -> list[str]:
    """What follows the program's name in a role's command."""
    words = list(commands.build(role, _STEP, (0,)).arguments)
    return words[words.index(PROGRAM) + 1:]


def count_ranks(commands: Commands, role: str) -> int:
    """Ranks that a role's program runs on."""
    return 1 if role == "generator" else commands.config.num_nodes * commands.config.nproc_per_node
