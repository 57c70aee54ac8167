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
