"""benchmarks/step.py end to end at tiny sizes, and what its report holds."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks.step import _collect, compute_ratios, parse_arguments  # noqa: E402
from tools.tool_reports import write_report  # noqa: E402
from tests.support.ranks import run_on_ranks  # noqa: E402

SIZES = "--prompt-length 40 --response-length 7 --group-size 3 --chunk-size 16 --block-size 4 --repeat 1".split()


@pytest.mark.ranks(seconds=35)
def test_two_ranks_report_on_standard_output():
    """Every run has its figures, and the settings and ratios of the figures are there; nothing else is printed."""
    command = [sys.executable, str(ROOT / "benchmarks" / "step.py"), *SIZES, "--json", "-", "--context-parallel-size", "2"]
    done = subprocess.run([*command, "--runs", "checkpointed,exact"], check=True, timeout=280, stdout=subprocess.PIPE, text=True)
    report = json.loads(done.stdout)
    runs, ratios = report["runs"], report["ratios"]
    assert list(runs) == ["checkpointed", "exact"]
    for figures in runs.values():
        assert {"seconds", "cpu_seconds", "peak_bytes", "peak_rss_bytes", "tokens"} <= set(figures)
        assert all(value > 0 for value in figures.values())
    # tokens are those that go through the model
    assert runs["checkpointed"]["tokens"] == 3 * (40 + 7 - 1) and runs["exact"]["tokens"] == 39 + 3 * 7
    for key in ("seconds", "cpu_seconds", "peak_bytes"):
        assert ratios[f"checkpointed_over_exact_{key}"] == runs["checkpointed"][key] / runs["exact"][key]
    assert ratios["exact_over_prompt_only"] == runs["exact"]["seconds"] / runs["exact"]["prompt_only_seconds"]
    assert report["settings"]["chunk_size"] == 16 and report["settings"]["model_preset"] == "tiny-qwen3.6"


@pytest.mark.ranks
def test_the_runs_compute_the_same_gradient(tmp_path):
    """Equal work is compared: the exact run's gradient is the conventional one's, which no one scored or cut."""
    run_on_ranks(Path(__file__).with_name("equal_gradients.py"), 2, tmp_path)


def test_the_report_goes_to_a_file_or_is_all_of_standard_output(tmp_path, capsys):
    report, path = {"runs": {}, "ratios": {"a_over_b": 1.5}}, tmp_path / "step.json"
    write_report(report, str(path))
    assert json.loads(path.read_text()) == report and capsys.readouterr().out == ""
    write_report(report, "-")
    assert json.loads(capsys.readouterr().out) == report


def test_a_killed_child_is_an_error_in_the_report(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
    figures = _collect("conventional", [process], str(tmp_path))
    assert figures == {"error": "conventional could not be measured (killed: most likely out of memory)"}
    assert process.returncode == -signal.SIGKILL


def test_a_rank_that_fails_ends_the_others_run(tmp_path):
    commands = ("import time; time.sleep(60)", "import sys; sys.exit(3)")
    processes = [subprocess.Popen([sys.executable, "-c", command]) for command in commands]
    try:
        figures = _collect("exact", processes, str(tmp_path))
    finally:
        processes[0].kill()
        processes[0].wait()
    assert figures == {"error": "exact could not be measured (exit code 3; see standard error)"}


@pytest.mark.parametrize(
    "bad, sentence",
    [
        (["--runs", "exact,quick"], "--runs quick is not known"),
        (["--model-preset", "no-such-model"], "--model-preset no-such-model is not known"),
        (["--group-size", "0"], "--group-size is at least 1"),
        (["--model-preset", "tiny-glm5.2", "--context-parallel-size", "3", "--expert-model-parallel-size", "3"],
         "--expert-model-parallel-size 3 does not divide --num-experts 16"),
        (["--model-preset", "tiny-glm5.2", "--expert-model-parallel-size", "2"],
         "--tensor-model-parallel-size 1 x --expert-model-parallel-size 2 does not divide the 1 ranks"),
        (["--prompt-length", "1"], "--prompt-length is at least 2"),
        (["--chunk-size", "0"], "--chunk-size is at least 1, not 0"),
        (["--seed", str(2**63)], "--seed lies between 0 and 2^63 - 1"),
        (["--json", "no-such-folder/step.json"], "--json no-such-folder/step.json: there is no folder no-such-folder"),
        (["--json", "."], "--json . is a folder"),
    ],
)
def test_bad_flags_get_a_sentence(bad, sentence, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(bad)
    assert sentence in capsys.readouterr().err


def test_ratios_of_runs_that_were_not_measured_are_left_out():
    runs = {"conventional": {"error": "killed"}, "exact": {"peak_bytes": 10}, "response_only": {"peak_bytes": 5}}
    assert compute_ratios(runs) == {"response_only_over_exact_peak_bytes": 0.5}
    assert compute_ratios({"conventional": {"seconds": 1.0}}) == {}
    assert os.environ.get("LONGSTRAW_BENCHMARK_RANK") is None
