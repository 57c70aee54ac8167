"""The dry run as a program: its report, --fit, and --dry-run behind a training script."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import REPOSITORY, run_forked

pytestmark = [pytest.mark.ranks(seconds=60), pytest.mark.timeout(600)]

HERE = Path(__file__).parent
SMALL = "--prompt-length 600 --response-length 8 --group-size 2 --prompt-chunk-size 128 --context-parallel-size 2".split()
TINY = ["--model-preset", "tiny-qwen3.6", *SMALL]


def run_program(tmp_path, *flags: str) -> tuple[int, dict | None, str]:
    """(exit code, what --json holds, what was printed) of the program with these flags."""
    path = tmp_path / "report.json"
    output = run_forked(HERE / "dry_run_ranks.py", ["program", tmp_path / "code", *flags, "--json", path], tmp_path, seconds=400)
    return int((tmp_path / "code").read_text()), json.loads(path.read_text()) if path.exists() else None, output


def test_the_report_holds_what_its_readers_need(tmp_path):
    code, report, output = run_program(tmp_path, *TINY)
    assert code == 0 and "dry run in" in output
    assert set(report["peak_bytes"]) == {"device", "host"} and report["peak_bytes"]["device"] > 0
    assert sum(report["categories"]["device"].values()) == report["peak_bytes"]["device"]
    assert {"capture", "decode", "responses", "prompt_reverse", "commit"} <= set(report["phases"])
    for phase in report["phases"].values():
        assert sum(phase["device"]["categories"].values()) == phase["device"]["bytes"]
    largest = max(phase["device"]["bytes"] for phase in report["phases"].values())
    assert report["peak_bytes"]["device"] == largest
    calls = report["collectives"]["cp"]["all_gather"]
    assert calls["calls"] > 0 and calls["bytes"] > 0
    assert report["topology"] == {"tensor": 1, "context": 2, "expert": 1, "data": 1} and report["rank"] in (0, 1)
    assert set(report["seconds"]) == {"H20", "H100", "H200", "B200"}
    for times in report["seconds"].values():
        assert 0 < times["bound"] <= times["estimate"] and times["limit"] in times["rows"]


def test_fit_finds_flags_that_hold_less_and_says_what_it_tried(tmp_path):
    flags = ["--fit", "--fit-over", "residency", "chunk", "--fit-jobs", "2", "--semantics", "response_only"]
    code, found, output = run_program(tmp_path, *TINY, *flags)
    assert code == 0 and "found in" in output and "--prompt-chunk-size 64" in output
    peaks = {tuple(tried["flags"]): tried["peak_bytes"]["device"] for tried in found["tried"]}
    winner = found["winner"]
    assert winner["report"]["peak_bytes"]["device"] == peaks[tuple(winner["flags"])] < peaks[()]
    assert len(found["tried"]) == len(peaks) == 5, "as given; pages on the host; boundary states too; chunks of 64 and 256"


def test_fit_finds_the_longest_prompt(tmp_path):
    limit = "13MB"
    flags = ["--fit", "prompt", "--device-memory", limit, "--fit-over", "residency", "--semantics", "response_only"]
    code, found, _ = run_program(tmp_path, *TINY, *flags, "--fit-jobs", "2", "--page-residency", "host")
    assert code == 0
    peak = found["winner"]["report"]["peak_bytes"]["device"]
    fitting = [tried for tried in found["tried"] if tried["peak_bytes"]["device"] <= 13e6]
    assert peak <= 13e6 and found["winner"]["prompt_length"] == max(tried["prompt_length"] for tried in fitting) > 600


def test_fit_says_in_one_sentence_that_nothing_fits(tmp_path):
    flags = ["--fit", "--device-memory", "1MB", "--fit-over", "chunk", "--fit-jobs", "2"]
    code, found, output = run_program(tmp_path, *TINY, *flags)
    assert code == 1 and found is None
    (line,) = [line for line in output.splitlines() if line.startswith("dry_run: nothing fits into --device-memory 0.001GB")]
    assert "of 3 dry runs the best holds" in line


def test_refused_flags_end_with_2(tmp_path):
    code, found, output = run_program(tmp_path, *TINY, "--fit", "prompt")
    assert code == 2 and found is None and "dry_run: error: --fit prompt needs --device-memory" in output


def test_a_training_script_with_dry_run_at_its_end(tmp_path):
    """Its own flags, on as many ranks as it would start; no output folder is made or removed."""
    report = tmp_path / "report.json"
    small = [*TINY, "--max-response-length", "8", "--prompt-length-limit", "600", "--logra-rank", "8", "--output-dir", tmp_path / "run"]
    script = [REPOSITORY / "examples/qwen3.6_27b/train_2m.sh", *small, "--dry-run", "--json", report]
    environment = os.environ | {"LONGSTRAW_VENV": sys.prefix, "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore"}
    environment.pop("WORLD_SIZE", None)
    done = subprocess.run(list(map(str, script)), env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(report.read_text())
    assert found["ranks"] == 8 and found["topology"]["data"] == 4 and not (tmp_path / "run").exists()
    assert found["peak_bytes"]["host"] > 0, "the script's residency"


@pytest.mark.parametrize("live", [[], ["--live-chunks", "2"]], ids=["", "graphs of two chunks kept"])
def test_blocks_that_are_left_out_count_as_if_they_had_run(live, tmp_path):
    """Peaks, operations, traffic, copies and exchanges of a run that leaves out blocks against one that runs all."""
    flags = "--prompt-chunk-size 64 --response-block-size 8 --page-residency host --adjoint-residency host".split()
    flags = ["--model-preset", "tiny-llama", *SMALL, "--response-length", "24", *flags, "--attention-output-residency", "host", *live]
    (sampled, every) = (run_program(tmp_path, *flags, *more)[1] for more in ([], ["--every-block"]))
    assert sampled["peak_bytes"] == pytest.approx(every["peak_bytes"], rel=1e-3)
    for phase, whole in every["work"].items():
        if phase in ("outside", "build", "replay"):  # where no block runs
            continue
        found = sampled["work"][phase]
        for name, number in {**whole, **whole["operations"]}.items():
            if name != "operations":
                near = 0.1 if name == "kernels" else 0.05  # a block's kernels depend on this rank's place in it, which goes round
                assert {**found, **found["operations"]}[name] == pytest.approx(number, rel=near), f"{phase} {name}"
    for group, operations in every["collectives"].items():
        for operation, numbers in operations.items():
            assert sampled["collectives"][group][operation] == pytest.approx(numbers, rel=0.01), f"{group} {operation}"
