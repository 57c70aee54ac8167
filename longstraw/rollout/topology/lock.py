"""One switcher at a time for a run: a lock that ends with its process, however that ends."""

import fcntl
import os
from pathlib import Path


class RunLock:
    """Holds a lock file from the moment it is made."""

    def __init__(self, path: Path):
        """Raises ValueError where another process holds it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise ValueError(f"another switcher runs in {path.parent}: two cannot share a --run-dir") from None

    def release(self) -> None:
        """Give the lock up."""
        os.close(self._descriptor)
