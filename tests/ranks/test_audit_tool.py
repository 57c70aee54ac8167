"""`tools/audit_gradients.py` as a user runs it: it starts its own ranks, writes its report, exits with 0.

What it says of a broken engine and of `response_only`: tests/unit/engine/test_audit_controls.py.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ranks(seconds=28), pytest.mark.timeout(600)]  # minutes on a busy machine
REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = ["--prompt-length", "29", "--response-lengths", "5,1", "--chunk-size", "12", "--block-size", "4"]
KEYS = {"semantics", "loss", "reference_loss", "max_relative_error", "global_relative_error", "cosine", "parameters"}


def test_two_context_parallel_ranks_report_on_standard_output():
    """Standard output is the JSON and nothing else."""
    done = subprocess.run(
        [sys.executable, "tools/audit_gradients.py", *SMALL, "--context-parallel-size", "2", "--json", "-"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=580,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert KEYS <= report.keys() and report["semantics"] == "exact"
    assert report["global_relative_error"] <= 1e-12 and report["cosine"] == pytest.approx(1, abs=1e-12)
    assert report["loss"] == pytest.approx(report["reference_loss"], rel=1e-12)
    names = report["parameters"]
    assert {"embedding.word_embeddings.weight", "decoder.layers.0.self_attention.A_log"} <= names.keys()
    assert all(set(entry) == {"relative_error", "cosine"} for entry in names.values())
    assert report["max_relative_error"] == max(entry["relative_error"] for entry in names.values())
    assert report["settings"]["context_parallel_size"] == 2
