"""How a switcher waits, and for how long. Every field is a flag (`drain_seconds` -> `--drain-seconds`)."""

import math
from dataclasses import dataclass, fields

from longstraw.rollout.topology.states import State


@dataclass(frozen=True, kw_only=True)
class DeadlineConfig:
    """Deadlines of the states, and what happens after one."""

    training_seconds: float = 28_800.0
    """Longest time for one training step, the start of its ranks included. It must be well below a job's time limit, or
    a step that hangs is ended by the limit and begun again in the next job, for ever."""

    exporting_seconds: float = 3_600.0
    """Longest time for the weights to be written once the step is committed; where a trainer has to be started for it,
    its start included."""

    draining_seconds: float = 300.0
    """Longest time for the trainer to end by itself and the devices to be empty; also for everything to be killed after
    a failure."""

    rollout_up_seconds: float = 1_800.0
    """Longest time for the engine to load the weights and answer."""

    generating_seconds: float = 28_800.0
    """Longest time for one step's rollouts and rewards."""

    rollout_down_seconds: float = 300.0
    """Longest time for the engine to end and the devices to be empty."""

    grace_seconds: float = 120.0
    """What each program has to end once it is asked to; a trainer finishes or rolls back its step and saves within
    it."""

    attempts: int = 3
    """Failures in a row, without any progress on the disk in between, after which the run is given up."""

    node_timeout: float = 30.0
    """Seconds of silence after which another host is taken for lost, and the run ends on every host."""

    rendezvous_seconds: float = 600.0
    """Longest time for all hosts to come together."""

    def __post_init__(self) -> None:
        """Refuse values out of range.

        Raises:
            ValueError: in one sentence that names the flag.
        """
        for field in fields(self):
            value, flag = getattr(self, field.name), f"--{field.name.replace('_', '-')}"
            if field.name == "attempts":
                if value < 1:
                    raise ValueError(f"{flag} must be at least 1, not {value}")
            elif not (math.isfinite(value) and value > 0.0):
                raise ValueError(f"{flag} must be finite and above 0, not {value:g}")

    def of(self, state: State) -> float:
        """The deadline of a state in seconds."""
        return getattr(self, f"{state.value}_seconds")
