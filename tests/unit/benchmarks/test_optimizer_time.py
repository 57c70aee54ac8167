"""benchmarks/optimizer_time.py: steps of every optimizer, in pairs, that move the weights."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks import optimizer_time  # noqa: E402
from benchmarks.live_step import open_model, open_update  # noqa: E402
from benchmarks.optimizer_time import build_flags, compare, measure, parse_arguments, time_step  # noqa: E402
from tests.support.models import one_rank  # noqa: E402

PARTS = ("replay", "step", "cpu")
SMALL = "--prompt-length 9 --response-length 2 --group-size 2 --chunk-size 8 --logra-rank 4 --repeat 2"


def test_every_optimizer_is_timed_and_the_first_pair_is_left_out(monkeypatch):
    one_rank()
    taken = []
    monkeypatch.setattr(optimizer_time, "time_step", lambda *step: taken.append(step[2]) or time_step(*step))
    found = measure(parse_arguments(SMALL.split()))
    assert taken == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert {name: len(steps) for name, steps in found["seconds"].items()} == {"adam": 2, "logra": 2, "logra fixed": 2}
    for steps in found["seconds"].values():
        assert all(step["step"] >= step["replay"] > 0 and step["update"] > 0 for step in steps)
    assert all(0 < parts["step"]["lowest"] <= parts["step"]["median"] for parts in found["over_adam"].values())


def test_a_timed_step_moves_the_weights():
    one_rank()
    for flags in build_flags(parse_arguments(SMALL.split())).values():
        live = open_update(open_model(flags))
        group = live.sample_group(prompt_length=9)
        before = [value.detach().clone() for value in live.opened.model.parameters()]
        for number in (1, 2):  # the first rate of Adam's warm-up is 0
            time_step(live, group, number)
        assert any(not value.equal(old) for value, old in zip(live.opened.model.parameters(), before)), flags


def test_ratios_are_of_pairs():
    ours, theirs = [dict.fromkeys(PARTS, seconds) for seconds in (3.0, 9.0)], [dict.fromkeys(PARTS, 2.0)] * 2
    assert compare(ours, theirs)["step"] == {"median": 3.0, "lowest": 1.5, "highest": 4.5}


@pytest.mark.parametrize("bad, sentence", [
    ("--model-preset nothing", "nothing"), ("--repeat 0", "--repeat is at least 1"),
    ("--group-size 1", "--group-size is at least 2"),
])
def test_bad_flags_get_a_sentence(bad, sentence, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(bad.split())
    assert sentence in capsys.readouterr().err
