"""Where checkpoints lie, and how a new one becomes the latest.

    SAVE/iter_0000010/                          a complete checkpoint
    SAVE/iter_0000020.partial/                  one that was being written when the run was killed
    SAVE/latest_checkpointed_iteration.txt      the number of the latest complete one, as in Megatron

A checkpoint is written under its partial name, made durable, given its own name, and named in the tracker last, each
in one atomic step: a run killed anywhere in between resumes from the checkpoint before. No torch here.
"""

import os
import shutil
from pathlib import Path

from longstraw.durable_files import sync_path, write_whole

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
_PARTIAL, _REPLACED = ".partial", ".replaced"


def checkpoint_folder(folder: str | Path, iteration: int | str) -> Path:
    """The folder of one checkpoint: of a step's number, or of RELEASE (weights without a training state)."""
    return Path(folder) / (RELEASE if iteration == RELEASE else f"iter_{iteration:07d}")


def read_tracker(folder: str | Path) -> int | str | None:
    """The step of the latest checkpoint, or RELEASE; None where there is no tracker file.

    Raises ValueError when the file holds anything else.
    """
    try:
        text = (Path(folder) / TRACKER).read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if text == RELEASE:
        return RELEASE
    if not text.isdecimal():
        raise ValueError(f"{Path(folder) / TRACKER} holds {text[:40]!r}, not the number of a step")
    return int(text)


def find_checkpoint(folder: str | Path, step: int | None = None) -> tuple[Path, int | str] | None:
    """(folder, step or RELEASE) of the latest checkpoint, or of the one asked for by `step` (--ckpt-step).

    Returns None where there is no tracker file and no `step`.
    Raises ValueError when the checkpoint that is named is not there.
    """
    iteration = read_tracker(folder) if step is None else step
    if iteration is None:
        return None
    _mend(Path(folder))
    path = checkpoint_folder(folder, iteration)
    if not (path / "metadata.json").is_file():
        named = f"--ckpt-step {step} asks for" if step is not None else f"{Path(folder) / TRACKER} names"
        raise ValueError(f"{named} the checkpoint {path}, which is missing or incomplete")
    return path, iteration


def open_partial(folder: str | Path, iteration: int | str) -> Path:
    """An empty folder to write a checkpoint into; what killed runs left behind is removed."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    _mend(Path(folder))
    for left in Path(folder).glob("*" + _PARTIAL):
        shutil.rmtree(left)
    partial = checkpoint_folder(folder, iteration).with_suffix(_PARTIAL)
    partial.mkdir()
    return partial


def _mend(folder: Path) -> None:
    """Finish or undo a replacement that was cut short: the old checkpoint goes back, unless the new one has its place."""
    for replaced in folder.glob("*" + _REPLACED):
        final = replaced.with_suffix("")
        if final.exists():
            shutil.rmtree(replaced)
        else:
            os.rename(replaced, final)


def commit_partial(partial: Path, folder: str | Path, iteration: int | str) -> Path:
    """Give a completely written checkpoint its name and make it the latest."""
    for file in partial.iterdir():
        sync_path(file)
    sync_path(partial)
    final = checkpoint_folder(folder, iteration)
    if final.exists():
        # A folder cannot be replaced in one step; `_mend` closes the gap where a run is killed between these two.
        replaced = final.with_suffix(_REPLACED)
        os.rename(final, replaced)
        os.rename(partial, final)
        shutil.rmtree(replaced)
    else:
        os.rename(partial, final)
    sync_path(Path(folder))
    write_tracker(folder, iteration)
    return final


def write_tracker(folder: str | Path, iteration: int | str) -> None:
    """Name the latest checkpoint."""
    write_whole(Path(folder) / TRACKER, str(iteration))


def drop_previous(folder: str | Path, previous: int | str | None, latest: int | str, retain_interval: int) -> None:
    """Remove the checkpoint before the latest, unless its step is a multiple of --save-retain-interval."""
    if not isinstance(previous, int) or previous == latest or previous % retain_interval == 0:
        return
    path = checkpoint_folder(folder, previous)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
