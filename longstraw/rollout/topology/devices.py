"""Are the devices empty? Asked before the other side starts.

On GPUs, by nvidia-smi: no process computes on the visible ones, and their used memory is back to what it was with
nothing of ours running. Without GPUs a side holds memory as processes and as files in /dev/shm, which
`longstraw.rollout.topology.node` looks at either way.

Left out: MIG slices, and devices of other makers.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

SLACK = 0.01
"""Share of a device's memory by which it may differ from before."""

_QUERY_SECONDS = 15.0


@dataclass(frozen=True, kw_only=True)
class DeviceUse:
    """One GPU at a moment."""

    uuid: str
    used_bytes: int
    total_bytes: int
    processes: tuple[int, ...]
    """Process ids that compute on it; in a container some or all may be hidden."""


def choose_devices(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Indices or UUIDs of the GPUs that a process with `environ` would see; () for none, None for all there are."""
    if shutil.which("nvidia-smi") is None:
        return ()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    return tuple(name.strip() for name in visible.split(",") if name.strip() not in ("", "-1"))


def read_devices(visible: tuple[str, ...] | None) -> list[DeviceUse]:
    """The visible GPUs as nvidia-smi has them.

    Raises RuntimeError where it fails: devices that cannot be seen must not be taken for empty ones.
    """
    if visible == ():
        return []
    chosen = [] if visible is None else ["-i", ",".join(visible)]
    memory = _query(["--query-gpu=uuid,memory.used,memory.total", *chosen])
    computing = _query(["--query-compute-apps=gpu_uuid,pid", *chosen])
    try:
        return [
            DeviceUse(
                uuid=uuid, used_bytes=int(used) << 20, total_bytes=int(total) << 20,
                processes=tuple(int(pid) for holder, pid in computing if holder == uuid),
            )
            for uuid, used, total in memory
        ]
    except ValueError:
        raise RuntimeError(f"what nvidia-smi says of memory and processes cannot be read: {memory}, {computing}") from None


def _query(arguments: list[str]) -> list[list[str]]:
    command = ["nvidia-smi", *arguments, "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_SECONDS, env=dict(os.environ))
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{' '.join(command)} did not answer within {_QUERY_SECONDS:g} s") from None
    if answer.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {(answer.stderr or answer.stdout).strip()}")
    return [[field.strip() for field in line.split(",")] for line in answer.stdout.splitlines() if line.strip()]


def explain_use(devices: list[DeviceUse], baseline: Mapping[str, int]) -> list[str]:
    """One clause for each GPU that is not empty. baseline: used bytes by UUID, of when nothing of ours ran."""
    found = []
    for device in devices:
        if device.processes:
            found.append(f"{device.uuid} is computed on by {', '.join(map(str, device.processes))}")
        elif device.used_bytes > baseline.get(device.uuid, 0) + SLACK * device.total_bytes:
            found.append(f"{device.uuid} holds {device.used_bytes - baseline.get(device.uuid, 0):,} bytes more than before")
    return found
