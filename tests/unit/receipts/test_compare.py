"""Receipts side by side: what differs comes first, ratios are of the first, and pictures are drawn."""

from dataclasses import replace

import pytest
from receipt_samples import make_receipt

from longstraw.receipts.compare import describe_topology, differ_in_meaning, find_differences, make_rows, open_receipts
from longstraw.receipts.compare_plot import draw_memory_over_time, draw_phases
from longstraw.receipts.plots import start_figure
from longstraw.receipts.receipt import (
    Check, CollectiveUse, MemoryMoment, RankMemory, Results, Staleness, Tokens, write_receipt,
)
from tools.compare_receipts import main

OTHER = dict(
    semantics="response_only", seconds={"replay": 71.0}, phase_tokens={"replay": 710},
    collectives=(CollectiveUse(group="cp", operation="all_gather", calls=2, bytes=2048),), metrics={"kl": 0.5, "step": 3},
    memory=tuple(RankMemory(rank=rank, peak_bytes=2500 - rank, categories={"weights": 1000}, host_bytes=64,
                            phases={"replay": 2400}) for rank in (0, 1)),
)


def row(rows, name):
    return next(row for row in rows if row.name == name)


def test_semantics_come_first_and_then_the_rest():
    first = make_receipt()
    other = make_receipt(**OTHER, objective=first.objective | {"group_size": 2})
    found = find_differences([first, other])
    assert found[0] == "gradient semantics differ: exact | response_only"
    assert "objective.group_size differs: 8 | 2" in found and len(found) == 2
    assert differ_in_meaning([first, other]) and not differ_in_meaning([first, first])
    assert find_differences([first, first]) == []


@pytest.mark.parametrize("change, start", [
    (dict(source="dry_run"), "sources differ: measured | foreseen"),
    (dict(semantics="stale_prefix", staleness=Staleness(prefix_age_steps=2, policy="reuse")), "gradient semantics differ"),
    (dict(tokens=Tokens(prompts=3, responses=24, prompt_tokens=301, response_tokens=48, loss_tokens=47)), "numbers of tokens"),
    (dict(memory=tuple(replace(memory, counted="tensors") for memory in make_receipt().memory)), "countings of memory differ"),
    (dict(seed=12), "seeds differ: "),
    (dict(update={"optimizer": "logra"}), "update.optimizer differs: not given | logra"),
    (dict(update={"lr": 1e-5}), "update.lr differs: not given | 1e-05"),
    (dict(rollout={"rollout_is": "token"}), "rollout.rollout_is differs: not given | token"),
])
def test_every_kind_of_difference_is_named(change, start):
    receipts = [make_receipt(), make_receipt(**change)]
    assert find_differences(receipts)[0].startswith(start)
    assert differ_in_meaning(receipts) == bool({"semantics", "source", "memory"} & change.keys())


def test_rows_have_ratios_to_the_first():
    rows = make_rows([make_receipt(), make_receipt(**OTHER)])
    peak = row(rows, "peak bytes")
    assert peak.values == (5000, 2500) and peak.ratios == (1.0, 0.5)
    assert row(rows, "  graph").values == (900, None) and row(rows, "  graph").texts[1] == "-"
    assert row(rows, "  replay").ratios == (1.0, 2.0)
    assert row(rows, "tokens a second in replay").values == (None, 10.0)
    assert row(rows, "bytes of all_gather over cp").values == (None, 2048.0)
    assert row(rows, "calls of all_gather over cp").texts == ("-", "2")
    assert row(rows, "processor seconds").texts == ("-", "-"), "not known is not 0"
    assert row(rows, "kl").values == (None, 0.5) and not any(r.name == "step" for r in rows)
    assert row(rows, "host bytes").ratios == (None, None)  # nothing over 0
    assert row(rows, "checks").texts == ("1 of 1 passed", "1 of 1 passed")
    assert describe_topology(make_receipt()) == "2: CP 2 on cpu"


def test_failed_checks_are_named():
    failed = make_receipt(checks=(Check(name="finite loss", passed=False), Check(name="ratio", passed=True)))
    assert row(make_rows([failed]), "checks").texts == ("1 of 2 passed, not finite loss",)


def write_run(folder, steps, **changes):
    for step in range(1, steps + 1):
        results = Results(first_step=step, last_step=step, first_eval_reward_mean=None, last_eval_reward_mean=None)
        write_receipt(folder / "receipts" / f"step-{step:06d}.json", make_receipt(results=results, **changes))


def test_folders_files_and_runs_that_have_not_ended(tmp_path):
    write_run(tmp_path / "run", 3)
    assert open_receipts(tmp_path / "run").receipt.results.last_step == 3  # of the last step: the run has not ended
    whole = replace(make_receipt(), seed=11)
    write_receipt(tmp_path / "run" / "receipt.json", whole)
    for path in (tmp_path / "run", tmp_path / "run" / "receipt.json"):
        opened = open_receipts(path)
        assert opened.receipt.seed == 11 and len(opened.steps) == 3
    single = open_receipts(tmp_path / "run" / "receipts" / "step-000002.json")
    assert single.steps == (single.receipt,) and single.receipt.results.last_step == 2
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a receipt of this format: .*lacks"):
        open_receipts(tmp_path / "bad.json")
    with pytest.raises(ValueError, match="has no receipt"):
        open_receipts(tmp_path)


def test_a_single_step_is_drawn_over_its_seconds_and_a_foreseen_one_as_its_peak(tmp_path):
    moments = tuple(MemoryMoment(seconds=at, phase="replay", bytes=size) for at, size in ((0.0, 1000), (2.5, 4000)))
    write_receipt(tmp_path / "measured.json", make_receipt(memory_over_time=moments))
    write_receipt(tmp_path / "dry.json", make_receipt(source="dry_run", memory=make_receipt().memory[:1], state=(), seconds={}))
    runs = [open_receipts(tmp_path / name) for name in ("measured.json", "dry.json")]
    _, (left, right) = start_figure()
    draw_memory_over_time(left, runs)
    draw_phases(right, runs)
    measured, foreseen = left.lines
    assert [*measured.get_xdata()] == [0.0, 2.5] and [*measured.get_ydata()] == [1000 / 1024, 4000 / 1024]
    assert [*foreseen.get_ydata()] == [5000 / 1024] * 2 and "foreseen" in foreseen.get_label()


def test_the_tool_prints_differences_first_and_draws(tmp_path, capsys):
    write_run(tmp_path / "a", 2)
    write_run(tmp_path / "b", 2, **OTHER)
    picture = tmp_path / "both.png"
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "gradient semantics differ: exact | response_only"
    assert "The figures below are of different computations." in lines
    assert "not the same thing" in "".join(lines) and picture.read_bytes()[:4] == b"\x89PNG"
    assert main([str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    assert "different" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([str(tmp_path / "nowhere")])
    assert f"there is no file {tmp_path / 'nowhere'}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path / "a"), "--output", str(tmp_path)])
    assert "must name a file in a folder that exists" in capsys.readouterr().err


def test_what_makes_the_table_is_text_and_no_markup(tmp_path, capsys):
    write_run(tmp_path / "run[bold]x", 1, metrics={"[red]kl": 0.5})
    assert main([str(tmp_path / "run[bold]x")]) == 0
    shown = capsys.readouterr().out
    assert "run[bold]x" in shown and "[red]kl" in shown


@pytest.mark.parametrize("text", ["[" * 100_000, '{"seed": 1e999}', '{"schema_version"'])
def test_a_file_that_is_no_receipt_is_named(tmp_path, text):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ValueError, match="bad.json is not a receipt of this format"):
        open_receipts(tmp_path / "bad.json")


def test_a_run_goes_on_after_the_receipt_that_an_earlier_one_left(tmp_path):
    write_receipt(tmp_path / "run" / "receipt.json", make_receipt(results=replace(make_receipt().results, last_step=2)))
    write_run(tmp_path / "run", 4, semantics="response_only")
    assert open_receipts(tmp_path / "run").receipt.semantics == "response_only"
