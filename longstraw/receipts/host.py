"""What this host has to give, now.

Left out: device memory (`longstraw.memory_meter` reads its peak).
"""

from pathlib import Path

import psutil


def read_free_host_bytes() -> int:
    """Bytes that this host can still give: what the system has available, or less where a cgroup (v2) limits it."""
    free = psutil.virtual_memory().available
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return max(free, 0)
