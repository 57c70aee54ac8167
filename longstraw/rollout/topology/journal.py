"""The switcher's journal: one JSON object a line, each on the disk before what it says begins.

    {"time": ..., "event": "enter", "state": "generating", "step": 3, ...}
    {"time": ..., "event": "done", "state": "generating", "step": 3, "seconds": 41.2, ...}

events: start (a switcher began), enter, done, failed (with a reason; the way back follows), stopped (by a signal), end.

The journal says what was intended; what is true is on the disk beside it (checkpoints, exported weights, rollouts). A
line that a kill cut short is dropped when the journal is opened again.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from longstraw.durable_files import sync_path


class Journal:
    """Appends to a journal, after what it holds already. One writer at a time: the caller holds the run's lock."""

    def __init__(self, path: Path):
        """Raises ValueError where a whole line is no JSON object: the file is no journal."""
        self.path = path
        read_journal(path)
        created = not path.exists()
        self._file = open(path, "ab")
        whole = _count_whole_bytes(path)
        if whole != path.stat().st_size:
            self._file.truncate(whole)
        if created:
            sync_path(path.parent)

    def write(self, event: str, **content: Any) -> None:
        """Append a line and have it on the disk."""
        line = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "event": event} | content
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """All lines, from the disk: a run of many steps has many, and nobody needs them while it goes."""
        return read_journal(self.path)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal, none where there is no file. Raises ValueError where one is no JSON object."""
    if not path.exists():
        return []
    lines = []
    for number, line in enumerate(path.read_bytes()[: _count_whole_bytes(path)].splitlines(), start=1):
        try:
            content = json.loads(line)
        except ValueError:
            content = None
        if not (isinstance(content, dict) and isinstance(content.get("event"), str)):
            raise ValueError(f"{path}:{number} is no line of a switcher's journal")
        lines.append(content)
    return lines


def _count_whole_bytes(path: Path) -> int:
    return path.read_bytes().rfind(b"\n") + 1
