"""Writers of a rollout store that are killed with SIGKILL at each call that changes the disk, and the readers after them.

    killed_writes.py FOLDER

Imports once and forks the writers. FOLDER's step 1 must stay; step 2, which is replaced, must be the old one, the new one or
absent, and at a new step's first write absent or whole.
"""

import os
import sys
from pathlib import Path

from rollout_samples import kill_at, make_group, make_manifest

from longstraw.rollout.store import RolloutStore

CALLS = ("fsync", "unlink", "replace")


def write(store: RolloutStore, step: int, reward: float) -> None:
    groups = [make_group(place, place, version=step - 1, reward=reward) for place in range(3)]
    store.write(groups, make_manifest(step))


def rewards_of(store: RolloutStore, step: int) -> float | None:
    """The first reward of a step, read whole; None where the step is not there."""
    return store.read(store.read_manifest(step))[0].rewards[0] if step in store.list_steps() else None


def walk(folder: Path, step: int) -> list[str]:
    """Kill a writer of `step` at every call, one after another -> which calls killed one."""
    store, killed = RolloutStore(folder), []
    for function in CALLS:
        for call in range(1, 20):
            before = rewards_of(store, step)
            reward = float(len(killed) + 2)
            process = os.fork()
            if process == 0:
                kill_at(function, call)
                write(store, step, reward)
                os._exit(0)
            ended = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            found = rewards_of(store, step)
            assert rewards_of(store, 1) == 1.0 and found in (before, reward, None), (function, call, before, found)
            if ended == 0:
                assert found == reward, (function, call, found)
                break
            assert ended == -9, ended
            killed.append(f"{function} {call}")
    return killed


def main() -> None:
    folder = Path(sys.argv[1])
    write(RolloutStore(folder), 1, 1.0)
    killed = walk(folder, 2)
    assert [name for name in killed if name.startswith("replace")] == ["replace 1", "replace 2"], killed
    assert "unlink 1" in killed and sum(name.startswith("fsync") for name in killed) >= 4, killed
    print(len(killed), "kills")


if __name__ == "__main__":
    main()
