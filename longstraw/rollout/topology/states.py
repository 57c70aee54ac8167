"""The states of a switch, and which one a run is in by what lies on its disk.

    training -> exporting -> draining -> rollout_up -> generating -> rollout_down -> training

| state | runs | is over when | way back after a failure or its deadline |
|---|---|---|---|
| training | trainer | the step's checkpoint is the latest | from the checkpoint before, with the same rollouts |
| exporting | trainer, or an exporter after a restart | the step's weights lie in the sync folder | those of the checkpoint are written |
| draining | trainer, ending | it has ended and every device is empty | what is left is killed; devices that stay full end the run |
| rollout_up | server | it answers, with the weights of the last step | ended and started anew |
| generating | server, generator | the next step's rollouts are in the store | server and generator anew, for the same step |
| rollout_down | server, ending | it has ended and every device is empty | what is left is killed; devices that stay full end the run |

Every way back leads through killing all that runs and waiting for empty devices, and then to the state that
`choose_state` finds on the disk: the rule that a restart follows too, so there is one way back and not one for each
state.
"""

from dataclasses import dataclass
from enum import Enum


class State(str, Enum):
    """A state of the machine; its value is its name in the journal and in flags."""

    TRAINING = "training"
    EXPORTING = "exporting"
    DRAINING = "draining"
    ROLLOUT_UP = "rollout_up"
    GENERATING = "generating"
    ROLLOUT_DOWN = "rollout_down"


FOLLOWING = {
    State.TRAINING: State.EXPORTING,
    State.EXPORTING: State.DRAINING,
    State.DRAINING: State.ROLLOUT_UP,
    State.ROLLOUT_UP: State.GENERATING,
    State.GENERATING: State.ROLLOUT_DOWN,
    State.ROLLOUT_DOWN: State.TRAINING,
}


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What lies on the disk."""

    committed: int
    """Step of the latest complete checkpoint; 0 before the first."""

    exported: bool
    """Whether the weights of that step are there, whole, for the rollout side."""

    rolled_out: bool
    """Whether the rollouts of the step after it are there, whole."""


def choose_state(progress: Progress, last_step: int) -> tuple[State, int] | None:
    """(state, step) to go on from with nothing running; None where nothing is left to do.

    The step is the one whose rollouts are made, or whose weights: rollout_up of step 3 serves the weights of step 2.
    """
    done = progress.committed
    if done >= last_step:
        return None if progress.exported else (State.EXPORTING, done)
    if progress.rolled_out:
        return State.TRAINING, done + 1
    return (State.ROLLOUT_UP, done + 1) if progress.exported else (State.EXPORTING, done)


def follow_state(state: State, step: int, last_step: int) -> tuple[State, int] | None:
    """What comes after a state that has ended well; None after the last step."""
    if state is State.DRAINING:
        return None if step >= last_step else (FOLLOWING[state], step + 1)
    return FOLLOWING[state], step


def explain_loss(lines: list[dict], progress: Progress) -> str:
    """One sentence where a journal tells of something done that the disk lacks, so that a restart would do it twice;
    else ""."""
    trained = max((line["step"] for line in lines if _tells(line, State.TRAINING)), default=0)
    if trained > progress.committed:
        return f"the journal tells of a committed step {trained}, and the latest checkpoint is of step {progress.committed}"
    generated = max((line["step"] for line in lines if _tells(line, State.GENERATING)), default=0)
    if generated == progress.committed + 1 and not progress.rolled_out:
        return f"the journal tells of the rollouts of step {generated}, and the store lacks them"
    return ""


def _tells(line: dict, state: State) -> bool:
    return line["event"] == "done" and line.get("state") == state.value
