"""A switcher's job under a real Slurm: submitted, signalled ahead of its limit, requeued, resumed, finished."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import REPOSITORY
from tests.support.slurm import Slurm, explain_absence
from tests.support.switches import Switch

pytestmark = [pytest.mark.ranks(seconds=60), pytest.mark.timeout(600)]
STEPS = 3
JOB = """#!/usr/bin/env bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=1
#SBATCH --signal=TERM@45
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={folder}/job.log
export PYTHONPATH={root}
exec {root}/tools/slurm_requeue.sh {python} {root}/tests/support/quick_switch.py {folder} {steps}
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    absence = explain_absence()
    if absence:
        pytest.skip(f"NOT TESTED: the switcher's job under Slurm: {absence}")
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.close()


def submit(slurm: Slurm, folder: Path) -> str:
    """The id of the tiny job."""
    script = folder / "job.sbatch"
    script.write_text(JOB.format(folder=folder, root=REPOSITORY, python=sys.executable, steps=STEPS))
    return slurm.ask("sbatch", "--parsable", str(script)).strip()


def test_a_job_is_signalled_ahead_of_its_limit_requeued_and_finishes(slurm, tmp_path):
    watched = Switch(tmp_path, STEPS)
    watched.hold("generating", 2)  # the first life does not get further than here
    job = submit(slurm, tmp_path)
    log = tmp_path / "job.log"
    slurm.wait_until(lambda: log.exists() and "queued again" in log.read_text(), "the signal and the requeue", 90)
    assert [line["event"] for line in watched.lines()][-2:] == ["stopped", "end"] and watched.lines()[-1]["status"] == 75
    watched.check_nothing_left()
    kept = watched.rollouts()
    assert list(kept) == ["rollouts-1"]
    watched.release("generating", 2)
    slurm.start_again(job)  # Slurm itself would wait two minutes
    slurm.wait_until(lambda: slurm.state(job) in ("COMPLETED", "FAILED"), "the end of the job", 90)
    assert slurm.state(job) == "COMPLETED", log.read_text()
    assert "start 2" in log.read_text() and kept.items() <= watched.rollouts().items()
    watched.check_outcome(STEPS)


def test_outside_a_job_it_says_so():
    shown = subprocess.run([REPOSITORY / "tools/slurm_requeue.sh", "true"], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert shown.returncode == 2 and "not within a Slurm job" in shown.stderr
