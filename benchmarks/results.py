"""Results of measurements, a JSON file each, so that an interrupted run goes on where it was and the page can be made again.

    store.measure("step/tiny-llama-p8192-r128-g8/exact.0", command, work)   # work() only where there is no result yet

A result holds its figures, the command and the settings that make it, its date, and the machine and versions that it ran with.
One that was measured with other settings is not taken for an answer. Left out: what a code change between two runs does to
results that are kept; `machine` names the commit of each.
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from longstraw.durable_files import write_whole

PACKAGES = ("torch", "megatron-core", "transformers", "trl", "prefix-grouper")


class ResultStore:
    """A folder of results."""

    def __init__(self, folder: Path):
        self.folder = folder

    def path(self, key: str, suffix: str = ".json") -> Path:
        """The file of a key such as `step/point/system.0`."""
        return self.folder / (key + suffix)

    def find(self, key: str) -> dict | None:
        """The figures of a key, if it was measured."""
        path = self.path(key)
        return _read(path)["figures"] if path.exists() else None

    def measure(self, key: str, command: str, work: Callable[[], dict], settings: Mapping[str, object] | None = None) -> dict:
        """The figures of a key: those of an earlier run, or those of `work`, kept.

        settings: what the key does not name, flag -> value. Raises SystemExit, in one sentence, for a result of other settings.
        """
        found, settings = self.find(key), dict(settings or {})
        if found is not None:
            kept = _read(self.path(key)).get("settings", {})
            other = {flag: kept.get(flag, "not noted") for flag in settings if kept.get(flag) != settings[flag]}
            if other:
                had = " ".join(f"{flag} {value}" for flag, value in other.items())
                raise SystemExit(f"benchmarks: {self.path(key)} was measured with {had}: let --results name another folder, or delete it")
        else:
            self.path(key).parent.mkdir(parents=True, exist_ok=True)
            started = time.strftime("%Y-%m-%d %H:%M")
            found = work()
            record = {
                "key": key, "figures": found, "command": command, "settings": settings, "date": started,
                "machine": describe_machine(),
            }
            write_whole(self.path(key), json.dumps(record, indent=1) + "\n")
            print(f"{key}: {json.dumps(found)[:300]}", file=sys.stderr, flush=True)
        return found

    def read_all(self) -> dict[str, dict]:
        """Every record by key, sorted."""
        records = (_read(path) for path in sorted(self.folder.rglob("*.json")) if "weights" not in path.parts)
        return {record["key"]: record for record in records if "key" in record}


def _read(path: Path) -> dict:
    """A result's record. Raises SystemExit, in one sentence, where a file is damaged."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise SystemExit(f"benchmarks: {path} is damaged ({error}): delete it and measure again") from error


def describe_machine() -> dict[str, str]:
    """Processor, cores, memory, system, versions of what is compared, and the commit of this code."""
    found = {"processor": _read_processor(), "cores": str(os.cpu_count()), "python": platform.python_version()}
    found["memory"] = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"
    found["system"] = f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}"
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    root = Path(__file__).resolve().parent.parent
    commit = subprocess.run(["git", "describe", "--always", "--dirty=+", "--abbrev=10"], cwd=root, capture_output=True, text=True)
    return found | {"commit": commit.stdout.strip() or "unknown"}


def _read_processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
