"""Files that outlive a crash of the machine, not only of the program."""

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """Have a file's content, or a folder's list of names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def let_others_read(path: Path) -> None:
    """Give a file the permissions of an ordinary new one, where its writer (safetensors) has left it its owner's alone."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def move_whole(partial: Path, path: Path) -> None:
    """Give a completely written file its name, durably: a reader sees the old file or the new one, whole."""
    sync_path(partial)
    os.replace(partial, path)
    sync_path(path.parent)


def write_whole(path: Path, text: str) -> None:
    """Write a small file: a reader sees the old text or the new one, whenever the writer is killed."""
    partial = path.with_name(path.name + ".new")
    partial.write_text(text)
    move_whole(partial, path)
