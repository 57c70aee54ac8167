"""Runs that are killed with SIGKILL while they save, and the runs that follow them.

Every run resumes, checks that it got one whole checkpoint (all weights and moments are made from the step's number),
and goes on saving step after step until it is killed: at a random moment, or at a named point of a save. Takes a
scratch folder; imports once and forks the runs, each a world of one rank.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist

from megatron.grpo.checkpoint_folders import checkpoint_folder, read_tracker
from megatron.grpo.checkpointing import load_checkpoint, save_checkpoint
from tests.ranks.training_state import TrainingState

POINTS = {  # name -> (function of os, its call in a save, what is on the disk then)
    "the data is being written": ("fsync", 1, "{partial}"),
    "the data is written, its metadata is not": ("rename", 1, "{partial}"),
    "everything is written under the partial name": ("rename", 2, "{partial}/metadata.json"),
    "the checkpoint has its name, the tracker is old": ("replace", 1, "{final}/metadata.json"),
}


def mark(state: TrainingState, step: int) -> None:
    """Make every weight and moment a number that names the step."""
    for index, parameter in enumerate(state.model.parameters()):
        parameter.data.fill_(step + index / 64)
        adam = state.optimizer.optimizer.state[parameter]
        adam["exp_avg"].fill_(-step - index / 64)
        adam["step"].fill_(step)


def check_marks(state: TrainingState, step: int) -> None:
    for index, parameter in enumerate(state.model.parameters()):
        adam = state.optimizer.optimizer.state[parameter]
        assert (parameter == step + index / 64).all() and (adam["exp_avg"] == -step - index / 64).all()
        assert adam["step"] == step


def kill_at(function: str, call: int) -> None:
    """End this process by SIGKILL at the given call of an `os` function."""
    original, calls = getattr(os, function), []

    def deadly(*args, **kwargs):
        calls.append(None)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(os, function, deadly)


def run(folder: str, expected: int | None, saves: int, point: tuple[str, int] | None) -> None:
    """Resume, check, and save up to `saves` more steps; a `point` kills this run in its last save."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    state = TrainingState(
        f"--model-preset tiny-llama --max-response-length 8 --num-layers 1 --save {folder} --load {folder} "
        "--save-interval 1"
    )
    resumed = load_checkpoint(state.args, state.model, state.optimizer, state.scheduler, state.groups)
    step = 0 if resumed is None else resumed.iteration
    assert expected is None or step == expected, f"resumed from step {step}, not {expected}"
    if resumed is not None:
        check_marks(state, step)
        assert resumed.data_position == {"position": step}
    Path(folder, "started").touch()
    for taken in range(1, saves + 1):
        mark(state, step + taken)
        if point and taken == saves:
            kill_at(*point)
        save_checkpoint(
            state.args, step + taken, state.model, state.optimizer, state.scheduler, state.groups,
            data_position={"position": step + taken},
        )


def start(folder: str, expected: int | None = None, saves: int = 0, point: tuple[str, int] | None = None) -> int:
    """Fork a run; returns its process id."""
    Path(folder, "started").unlink(missing_ok=True)
    process = os.fork()
    if process == 0:
        status = 1
        try:
            run(folder, expected, saves, point)
            status = 0
        finally:
            sys.stdout.flush()
            if status:
                import traceback

                traceback.print_exc()
            os._exit(status)
    return process


def finish(process: int) -> int:
    """The status of a run: 0, 1, or -9 when it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def main(folder: str) -> None:
    draw = random.Random()
    seed = draw.randrange(10**6)
    print(f"seed {seed}", flush=True)
    draw = random.Random(seed)
    Path(folder).mkdir(exist_ok=True)
    assert finish(start(folder, 0, saves=2)) == 0

    step = 2
    for name, (function, call, found) in POINTS.items():
        assert finish(start(folder, step, 2, (function, call))) == -signal.SIGKILL, name
        step += 1  # the first of the two saves; the second was cut short
        assert read_tracker(folder) == step, name
        final = checkpoint_folder(folder, step + 1)
        assert Path(found.format(partial=f"{final}.partial", final=final)).exists(), name
        print(f"passed: {name}", flush=True)
    # The last point left a complete step+1 that is not the latest: it is replaced, and the kill hits the gap.
    assert finish(start(folder, step, 1, ("rename", 3))) == -signal.SIGKILL
    assert Path(f"{final}.replaced").exists() and not final.exists()
    print("passed: the old checkpoint of the same step is aside, the new one not yet in its place", flush=True)

    for attempt in range(3):
        process = start(folder, step, saves=1000)
        while not Path(folder, "started").exists():
            time.sleep(0.01)
        begun = time.monotonic()
        while read_tracker(folder) == step and time.monotonic() - begun < 60:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 2 * (time.monotonic() - begun)))
        os.kill(process, signal.SIGKILL)
        assert finish(process) == -signal.SIGKILL
        assert read_tracker(folder) > step
        step = read_tracker(folder)
        print(f"passed: killed at random {attempt}, step {step}", flush=True)
    assert finish(start(folder, step, saves=1)) == 0
    left = sorted(name for name in os.listdir(folder) if not name.startswith("iter_") or "." in name)
    assert left == ["latest_checkpointed_iteration.txt", "longstraw_model.json", "started"], left
    print("passed: nothing is left over", flush=True)


if __name__ == "__main__":
    main(sys.argv[3])
