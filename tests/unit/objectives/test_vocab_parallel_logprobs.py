"""Log-probabilities with the vocabulary split over two gloo ranks equal those of one rank, float64."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]


@pytest.mark.ranks
def test_two_ranks_equal_one(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "vocab_parallel_ranks.py"), str(rank), "2", str(tmp_path / "rendezvous")],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=240)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(outputs)
