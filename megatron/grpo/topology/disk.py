"""What lies on a run's disk: the step of its latest checkpoint, the weights for the engine, the rollouts.

Each is whole where it can be seen at all: whoever writes it names it last (`megatron.grpo.checkpoint_folders`,
`longstraw.rollout.weight_folder`, `longstraw.rollout.store`). Contents are checked by those that read them.
"""

from pathlib import Path

from longstraw.rollout.manifest import StepManifest
from longstraw.rollout.topology.states import Progress
from longstraw.rollout.weight_folder import FolderManifest, plan_syncs, read_manifest, version_folder
from megatron.grpo.checkpoint_folders import RELEASE, read_tracker


def read_progress(checkpoints: Path, weights: Path, rollouts: Path) -> Progress:
    """How far a run is. Raises ValueError where a file is not what it should be."""
    latest = read_tracker(checkpoints)
    if latest == RELEASE:
        raise ValueError(f"{checkpoints} holds weights without a training state: give them by --pretrained-checkpoint")
    committed = latest or 0
    return Progress(
        committed=committed, exported=committed == 0 or find_weights(weights, committed) is not None,
        rolled_out=has_rollouts(rollouts, committed + 1),
    )


def find_weights(weights: Path, version: int) -> FolderManifest | None:
    """The manifest of a version's folder; None where the folder is not whole. Raises ValueError where it is
    another's."""
    folder = version_folder(weights, version)
    try:
        manifest = read_manifest(folder)
    except ValueError:
        return None  # not there, not finished, or cut short: it is written again
    if manifest.version != version:
        raise ValueError(f"{folder} holds version {manifest.version}")
    return manifest


def has_rollouts(rollouts: Path, step: int) -> bool:
    """Whether a step's rollouts are there. Raises ValueError where they are of other weights than the step needs."""
    path = rollouts / f"step-{step:06d}.json"
    try:
        manifest = StepManifest.from_json(path.read_text())
    except FileNotFoundError:
        return False
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None
    if (manifest.step, manifest.weight_version) != (step, step - 1):
        raise ValueError(f"{path} is of step {manifest.step} and weight version {manifest.weight_version}")
    return True


def choose_start(weights: Path, model: Path, version: int) -> tuple[Path, bool]:
    """The folder that an engine starts from to come to a version, and whether it takes the weights of that folder.

    It does where they are of its own precision. Where updates build on whole weights at the trainer's precision, it
    starts without any and is synced to those first, so that they are rounded as the trainer rounds.

    Raises ValueError where a folder that it needs is missing or not whole.
    """
    if version == 0 and find_weights(weights, 0) is None:
        return model, True
    first = plan_syncs(weights, (), version)[0]
    return (model, False) if read_manifest(first).full_precision else (first, True)
