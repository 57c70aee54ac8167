"""The page of benchmarks/run.sh from results that are written here, the results' store, the search for the longest prompt."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks.limit_part import find_longest  # noqa: E402
from benchmarks.measurement import Work, measure_in_process, open_server  # noqa: E402
from benchmarks.page import write_page  # noqa: E402
from benchmarks.page_steps import collect_steps, judge_bars  # noqa: E402
from benchmarks.points import Point, estimate_seconds, list_points  # noqa: E402
from benchmarks.results import ResultStore  # noqa: E402
from benchmarks.run import parse_arguments  # noqa: E402
from benchmarks.systems import Setup, run_steps  # noqa: E402


def fill(folder: Path) -> ResultStore:
    """Results of two points, in which TRL takes 8, then 7 and 9 times as long, and PrefixGrouper 1.2 times."""
    store = ResultStore(folder)
    for length in (2048, 8192):
        for turn, factor in enumerate((8.0, 7.0, 9.0)):
            for system, times in (("exact", 1.0), ("trl", factor), ("prefix_grouper", 1.2)):
                figures = {"seconds": 4 * times, "cpu_seconds": 2 * times, "rss_bytes": int(1e8 * times)}
                key = f"step/tiny-llama.p{length}-g8-r128/{system}.{turn}"
                store.measure(key, f"benchmarks/run.sh --systems {system}", lambda: figures)
    store.measure("step/tiny-llama.p8192-g8-r128/conventional.0", "benchmarks/run.sh", lambda: {"error": "not run: long"})
    limit = {"longest_prompt": 4096, "more_may_fit": False, "trials": {"4096": "fits", "8192": "out of memory"}}
    store.measure("limit/tiny-llama.m128-g4-r128/exact", "benchmarks/run.sh --parts limit", lambda: limit)
    return store


def test_the_page_has_ratios_their_spread_bars_machine_and_plots(tmp_path):
    fill(tmp_path / "results")
    write_page(tmp_path / "results", tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "| at least 6 times faster than trl | processor seconds of a step | trl | 8.00 (7.00 to 9.00) | yes |" in text
    assert "| at least 1.5 times faster than prefix_grouper | wall seconds of a step | prefix_grouper | 1.20 (1.20 to 1.20) | **no** |" in text
    assert "| tiny-llama | 8,192 | 8 | 2.00 s | not run |" in text and "| exact | 4,096 | 4,096, 8,192 |" in text
    assert "megatron-core 0.19" in text and "Not yet run on a GPU" in text and "- nowhere at the sizes measured" in text
    for name in ("cpu_seconds_by_prompt_length", "rss_bytes_by_prompt_length", "longest_prompt"):
        assert f"(page/{name}.png)" in text and (tmp_path / "page" / f"{name}.png").stat().st_size > 5000


def test_where_another_is_better_the_page_says_so(tmp_path):
    store = fill(tmp_path / "results")
    for turn in range(3):
        path = store.path(f"step/tiny-llama.p2048-g8-r128/prefix_grouper.{turn}")
        record = json.loads(path.read_text())
        record["figures"]["cpu_seconds"] = 1.0
        path.write_text(json.dumps(record))
    write_page(tmp_path / "results", tmp_path / "page.md")
    assert "- tiny-llama, prompt 2,048, G 8: processor seconds of a step: prefix_grouper (0.50)" in (tmp_path / "page.md").read_text()


def test_a_bar_is_judged_by_the_median_at_its_sizes(tmp_path):
    judged = judge_bars(collect_steps(fill(tmp_path).read_all()))
    assert {(bar, setting): reached for bar, _, setting, _, reached, _ in judged} == {
        ("at least 6 times faster than trl", "trl"): True, ("under half the peak memory of trl", "trl"): True,
        ("at least 1.5 times faster than prefix_grouper", "prefix_grouper"): False,
        ("a lower peak than prefix_grouper", "prefix_grouper"): True,
    }


def test_a_result_is_kept_with_its_command_machine_and_date(tmp_path):
    store, calls = ResultStore(tmp_path), []
    for _ in range(2):
        found = store.measure("step/a.p1-g2-r3/exact.0", "a command", lambda: calls.append(1) or {"seconds": 1.0})
        assert found == {"seconds": 1.0}
    record = store.read_all()["step/a.p1-g2-r3/exact.0"]
    assert calls == [1] and record["command"] == "a command" and record["date"].startswith("20")
    assert {"processor", "memory", "torch", "trl", "prefix-grouper", "commit"} <= set(record["machine"])


def test_a_result_of_other_settings_is_no_answer_and_a_damaged_one_is_named(tmp_path):
    store = ResultStore(tmp_path)
    for chunk in (32, 32):
        store.measure("step/a/exact.0", "a command", lambda: {"seconds": 1.0}, {"--chunk-size": chunk, "--seed": 1})
    with pytest.raises(SystemExit, match="step/a/exact.0.json was measured with --chunk-size 32: let --results name another folder"):
        store.measure("step/a/exact.0", "a command", lambda: {"seconds": 1.0}, {"--chunk-size": 8, "--seed": 1})
    store.measure("step/b/exact.0", "a command", lambda: {"seconds": 1.0})
    with pytest.raises(SystemExit, match="step/b/exact.0.json was measured with --chunk-size not noted"):
        store.measure("step/b/exact.0", "a command", lambda: {"seconds": 1.0}, {"--chunk-size": 8})
    file = store.path("step/a/exact.0")
    file.write_text(file.read_text()[:40])
    for read in (store.read_all, lambda: store.find("step/a/exact.0")):
        with pytest.raises(SystemExit, match="step/a/exact.0.json is damaged"):
            read()


@pytest.mark.parametrize("longest", [0, 512, 600, 900, 1023, 1024, 4000, 9999])
def test_the_search_finds_what_fits_to_a_fifth(longest):
    tried = []
    found = find_longest(lambda length: tried.append(length) or length <= longest, 512, 4096)
    assert found <= longest and (found == 0) == (longest < 512)
    if 512 <= longest < 4096:
        assert found * 1.2 > longest
    assert len(tried) == len(set(tried)) <= 6


def test_a_search_that_runs_out_of_time_keeps_what_fitted():
    def fits(length: int) -> bool:
        if length > 1000:
            raise TimeoutError
        return True

    with pytest.raises(TimeoutError) as ended:
        find_longest(fits, 512, 4096)
    assert ended.value.args == (512,)


def test_points_and_estimates():
    args = Namespace(prompt_lengths=[4096, 2048], group_size=8, group_sizes=[2, 8], prompt_length=2048, response_length=128)
    small, middle, large = list_points(args)
    assert (small, middle, large) == (Point(2048, 2, 128), Point(2048, 8, 128), Point(4096, 8, 128))
    known = {small: {"cpu_seconds": 1.0}, middle: {"error": "took longer than 3 s"}}
    assert estimate_seconds("conventional", large, known) == pytest.approx(4 * 2**1.75)
    assert estimate_seconds("exact", large, known) == pytest.approx(2**1.75) and estimate_seconds("exact", large, {}) is None


@pytest.mark.ranks(seconds=40)
def test_a_process_out_of_memory_and_one_out_of_time_are_results(tmp_path):
    """With a real system: a step of 512 tokens in 1 MiB, and the same in half a second."""
    setup, context = Setup(model_preset="tiny-llama"), open_server()
    sizes = dict(setup=setup, folder=tmp_path, system="response_only", prompt_length=512, response_length=8, group_size=2)
    measure = lambda limit, seconds: measure_in_process(  # noqa: E731
        context, Work(kind="fit", limit_bytes=limit * 2**20, **sizes), tmp_path / "log", seconds
    )
    assert measure(1, 200) == {"error": "out of memory"}
    assert measure(500, 200) == {}
    assert measure(500, 0.01) == {"error": "took longer than 0.01 s"}
    broken = Work(kind="step", **sizes | {"system": "exact", "group_size": 0})
    assert "ended with exit code 1" in measure_in_process(context, broken, tmp_path / "log", 200)["error"]


@pytest.mark.parametrize("bad, sentence", [
    (["--parts", "step,speed"], "--parts speed is not known"),
    (["--systems", "exact", "quick"], "--systems quick is not known"),
    (["--model-preset", "tiny-qwen3.6"], "has a hook for attention alone, and --model-preset tiny-qwen3.6 has other layers"),
    (["--model-preset", "no-such-model"], "--model-preset no-such-model is not known"),
    (["--group-sizes", "1"], "are at least 2: responses are compared"),
    (["--prompt-lengths", "1"], "are at least 2: a prompt's last token starts the responses"),
    (["--repeat", "0"], "--repeat is at least 1"),
])
def test_bad_flags_get_a_sentence(bad, sentence, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(bad)
    assert sentence in capsys.readouterr().err


def test_an_unknown_system_is_refused():
    with pytest.raises(ValueError, match="system quick is not known"):
        run_steps("quick", Setup(), Path("."), [], lambda number: None)
