"""What this host has to give, and what this process has of it, now.

Left out: device memory (`longstraw.memory_meter` reads it).
"""

import resource
from pathlib import Path

import psutil


def read_free_host_bytes() -> int:
    """Bytes that this host can still give: what the system has available, or less where a cgroup (v2) limits it."""
    free = psutil.virtual_memory().available
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return max(free, 0)


def read_resident_bytes() -> int:
    """Bytes of this process that are in memory, libraries included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
