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
from tools.local_ranks import run_ranks  # noqa: E402

SIZES = "--prompt-length 40 --response-length 7 --group-size 3 --chunk-size 16 --block-size 4 --repeat 1".split()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("step") / "step.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "step.py"), *SIZES, "--json", str(path)]
    subprocess.run([*command, "--runs", "checkpointed,exact"], check=True, timeout=280)
    return json.loads(path.read_text())


def test_every_run_has_its_figures(report):
    assert list(report["runs"]) == ["checkpointed", "exact"]
    for figures in report["runs"].values():
        assert {"seconds", "cpu_seconds", "peak_bytes", "peak_rss_bytes", "tokens"} <= set(figures)
        assert all(value > 0 for value in figures.values())


def test_tokens_are_those_that_go_through_the_model(report):
    assert report["runs"]["checkpointed"]["tokens"] == 3 * (40 + 7 - 1)
    assert report["runs"]["exact"]["tokens"] == 39 + 3 * 7


def test_ratios_are_of_the_figures(report):
    runs, ratios = report["runs"], report["ratios"]
    for key in ("seconds", "cpu_seconds", "peak_bytes"):
        assert ratios[f"checkpointed_over_exact_{key}"] == runs["checkpointed"][key] / runs["exact"][key]
    assert ratios["exact_over_prompt_only"] == runs["exact"]["seconds"] / runs["exact"]["prompt_only_seconds"]


def test_settings_are_in_the_report(report):
    assert report["settings"]["chunk_size"] == 16 and report["settings"]["model_preset"] == "tiny-qwen3.6"


@pytest.mark.ranks
def test_two_ranks_one_run_to_standard_output():
    command = [sys.executable, str(ROOT / "benchmarks" / "step.py"), *SIZES, "--json", "-"]
    command += ["--runs", "exact", "--measure", "memory", "--context-parallel-size", "2"]
    done = subprocess.run(command, check=True, timeout=280, stdout=subprocess.PIPE, text=True)
    report = json.loads(done.stdout)
    assert set(report["runs"]) == {"exact"} and report["ratios"] == {}
    assert report["runs"]["exact"]["peak_bytes"] > 0 and "seconds" not in report["runs"]["exact"]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.ranks)])
def test_the_runs_compute_the_same_gradient(ranks):
    """Equal work is compared: the exact run's gradient is the conventional one's, which no one scored or cut."""
    assert run_ranks(str(Path(__file__).with_name("equal_gradients.py")), [str(ranks)], ranks) == 0


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
