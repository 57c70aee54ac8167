"""`tools/audit_gradients.py` as a user runs it: it starts its own ranks, writes its report, exits with 0."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]  # seconds on a free machine, minutes on a busy one
REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = ["--prompt-length", "29", "--response-lengths", "5,1", "--chunk-size", "12", "--block-size", "4"]
KEYS = {"semantics", "loss", "reference_loss", "max_relative_error", "global_relative_error", "cosine", "parameters"}


def run_audit(*flags, seconds=580):
    return subprocess.run(
        [sys.executable, "tools/audit_gradients.py", *SMALL, *flags], cwd=REPOSITORY, capture_output=True, text=True,
        timeout=seconds,
    )


def test_two_context_parallel_ranks_write_a_report(tmp_path):
    path = tmp_path / "report.json"
    done = run_audit("--context-parallel-size", "2", "--json", str(path))
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(path.read_text())
    assert KEYS <= report.keys() and report["semantics"] == "exact"
    assert report["global_relative_error"] <= 1e-12 and report["cosine"] == pytest.approx(1, abs=1e-12)
    assert report["loss"] == pytest.approx(report["reference_loss"], rel=1e-12)
    names = report["parameters"]
    assert {"embedding.word_embeddings.weight", "decoder.layers.0.self_attention.A_log"} <= names.keys()
    assert all(set(entry) == {"relative_error", "cosine"} for entry in names.values())
    assert report["max_relative_error"] == max(entry["relative_error"] for entry in names.values())
    assert report["settings"]["context_parallel_size"] == 2
    assert "global relative error" in done.stdout and str(path) in done.stdout


def test_response_only_reports_its_distance_on_standard_output():
    """It could measure, so it exits with 0, however large the distance; standard output is the JSON and nothing else."""
    done = run_audit("--semantics", "response_only", "--model-preset", "tiny-llama", "--json", "-")
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["semantics"] == "response_only"
    assert report["global_relative_error"] > 1e-2 and report["cosine"] < 0.999
    assert report["loss"] == pytest.approx(report["reference_loss"], rel=1e-12)
