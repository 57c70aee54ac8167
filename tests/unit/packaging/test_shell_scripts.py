"""Every shell script and Slurm job passes shellcheck; those that take PLAN print commands that the programs would
accept."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from longstraw.rollout.topology.config import DeadlineConfig
from longstraw.rollout.topology.states import State

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


LOOPS = "examples/glm5.2/train_loop.sh", "examples/qwen3.6_27b/train_loop.sh"


@pytest.mark.parametrize("script, environment, message", [
    (LOOPS[0], {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "a"}, "NNODES=2: the ranks here"),
    (LOOPS[0], {"NNODES": "4"}, "set NODE_RANK (0 to 3) and MASTER_ADDR"),
    (LOOPS[0], {"NNODES": "4", "NODE_RANK": "1"}, "set NODE_RANK (0 to 3) and MASTER_ADDR"),
    (LOOPS[1], {"NNODES": "4"}, "NNODES=4: set NODE_RANK (0 to 3) and MASTER_ADDR"),
    (LOOPS[1], {"NNODES": "3", "NODE_RANK": "0", "MASTER_ADDR": "a"}, "NNODES=3: the ranks here are those of 1 node"),
    (LOOPS[1], {"NNODES": "four"}, "NNODES=four"), (LOOPS[1], {"NNODES": "0"}, "NNODES=0"),
])
def test_what_a_node_lacks_is_said_in_a_sentence(script, environment, message):
    shown = subprocess.run(
        [ROOT / script], capture_output=True, text=True, timeout=60,
        env={"PATH": "/usr/bin:/bin", "LONGSTRAW_VENV": "/nowhere"} | environment,
    )
    assert shown.returncode == 2 and message in shown.stderr and shown.stderr.count("\n") == 1, shown.stderr


def test_a_job_that_has_its_nodes_alone_has_their_memory():
    """--exclusive gives the processors and GPUs; memory stays at the partition's default without --mem=0."""
    jobs = [*(ROOT / "examples").rglob("*.sbatch"), ROOT / "README.md"]
    asking = [path for path in jobs if "--exclusive" in path.read_text()]
    assert len(asking) >= 4 and all("--mem=0" in path.read_text() for path in asking)


def test_a_states_deadline_comes_before_the_jobs_time_limit():
    limits = [re.search(r"--time=(\d+):00:00", path.read_text()) for path in (ROOT / "examples").rglob("train_loop.sbatch")]
    seconds = min(3600 * int(found[1]) for found in limits)
    assert all(2 * DeadlineConfig().of(state) < seconds for state in State), seconds


@pytest.mark.parametrize("script, hosts, ray", [(LOOPS[0], 4, True), (LOOPS[1], 1, False)])
def test_a_loops_plan_is_printed_without_gpus(script, hosts, ray, tmp_path):
    shown = subprocess.run(
        [ROOT / script], capture_output=True, text=True, timeout=300,
        env=os.environ | {"PLAN": "1", "LONGSTRAW_VENV": sys.prefix, "OUTPUT": str(tmp_path / "out")},
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(f"{hosts} x 8 = {8 * hosts} devices.")
    assert shown.stdout.count("--rollouts-from") == hosts and ("ray start" in shown.stdout) == ray
    assert not (tmp_path / "out").exists()


