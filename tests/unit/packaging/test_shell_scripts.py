"""Every shell script and Slurm job passes shellcheck; those that take PLAN print commands that the programs would
accept."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SHELLCHECK = Path(sys.prefix, "bin/shellcheck")


def list_scripts() -> list[Path]:
    """Files of the repository that bash or sh runs or sources."""
    listing = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True)
    names = listing.stdout.decode().split("\0") if listing.returncode == 0 else [
        str(path.relative_to(ROOT)) for folder in ("examples", "tests", "tools", ".ci") for path in (ROOT / folder).rglob("*")]
    found = []
    for path in (ROOT / name for name in names if name):
        if path.is_file():
            with open(path, "rb") as file:
                first = file.readline(64)
            if path.suffix == ".sh" or (first.startswith(b"#!") and first.rstrip().endswith((b"bash", b"/sh"))):
                found.append(path)
    return found


def check(*paths: Path) -> subprocess.CompletedProcess:
    return subprocess.run([SHELLCHECK, "-x", *paths], cwd=ROOT, capture_output=True, text=True)


def test_every_script_is_clean():
    scripts = list_scripts()
    names = {path.name for path in scripts}
    assert {"run.sh", "switch_topology.sh", "slurm_requeue.sh", "train_loop.sbatch", "train_vllm_cpu.sh"} <= names
    shown = check(*scripts)
    assert shown.returncode == 0, shown.stdout


def test_a_fault_is_seen(tmp_path):
    script = tmp_path / "bad.sh"
    script.write_text("#!/bin/bash\nrm -rf $1/$2\n")
    shown = check(script)
    assert shown.returncode == 1 and "SC2086" in shown.stdout


@pytest.mark.parametrize("script, hosts, ray", [("examples/glm5.2/train_loop.sh", 4, True), ("examples/qwen3.6_27b/train_loop.sh", 1, False)])
def test_a_loops_plan_is_printed_without_gpus(script, hosts, ray, tmp_path):
    shown = subprocess.run(
        [ROOT / script], capture_output=True, text=True, timeout=60,
        env=os.environ | {"PLAN": "1", "LONGSTRAW_VENV": sys.prefix, "OUTPUT": str(tmp_path / "out")},
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(f"{hosts} x 8 = {8 * hosts} devices.")
    assert shown.stdout.count("--rollouts-from") == hosts and ("ray start" in shown.stdout) == ray
    assert not (tmp_path / "out").exists()


