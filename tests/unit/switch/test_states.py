"""Which state a disk asks for, what follows, and what a journal must not tell."""

import json
import tracemalloc

import pytest

from longstraw.rollout.topology.journal import Journal, read_journal
from longstraw.rollout.topology.states import FOLLOWING, Progress, State, choose_state, explain_loss, follow_state


def progress(committed: int, exported: bool = True, rolled_out: bool = False) -> Progress:
    return Progress(committed=committed, exported=exported, rolled_out=rolled_out)


@pytest.mark.parametrize("found, place", [
    (progress(0), (State.ROLLOUT_UP, 1)),
    (progress(0, rolled_out=True), (State.TRAINING, 1)),
    (progress(2, exported=False, rolled_out=True), (State.TRAINING, 3)),
    (progress(2, exported=False), (State.EXPORTING, 2)),
    (progress(2), (State.ROLLOUT_UP, 3)),
    (progress(4, exported=False), (State.EXPORTING, 4)),
    (progress(4), None),
    (progress(5), None),
])
def test_the_disk_says_where_to_go_on(found, place):
    assert choose_state(found, last_step=4) == place


def test_states_follow_in_a_circle_and_end_after_the_last_step():
    place, seen = (State.ROLLOUT_UP, 1), []
    while place is not None:
        seen.append(place)
        place = follow_state(*place, last_step=2)
    assert [state.value for state, step in seen] == [
        "rollout_up", "generating", "rollout_down", "training", "exporting", "draining",
    ] * 2
    assert [step for _, step in seen] == [1] * 6 + [2] * 6 and set(FOLLOWING) == set(State)


def done(state: str, step: int) -> dict:
    return {"event": "done", "state": state, "step": step}


@pytest.mark.parametrize("lines, found, message", [
    ([done("training", 3)], progress(3), ""),
    ([done("training", 3)], progress(2), "committed step 3, and the latest checkpoint is of step 2"),
    ([done("generating", 3)], progress(2, rolled_out=True), ""),
    ([done("generating", 3)], progress(2), "the rollouts of step 3, and the store lacks them"),
    ([done("generating", 3)], progress(3), ""),
    ([done("generating", 3) | {"event": "failed"}], progress(2), ""),
    ([{"event": "start"}], progress(0), ""),
])
def test_what_was_done_and_is_gone_is_not_done_again(lines, found, message):
    assert message in explain_loss(lines, found) and bool(message) == bool(explain_loss(lines, found))


def test_a_line_that_a_kill_cut_short_is_dropped(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.write("start", hosts=1)
    journal.close()
    with open(path, "a") as file:
        file.write('{"event": "enter", "sta')
    again = Journal(path)
    assert [line["event"] for line in again.read()] == ["start"]
    again.write("end", status=0)
    again.close()
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["start", "end"]


def test_a_journal_is_on_the_disk_and_not_in_memory(tmp_path):
    """A loop of many steps keeps nothing of those that are over."""
    journal, processes = Journal(tmp_path / "journal.jsonl"), {"node-0": {"trainer": [1, 2]}}
    journal.write("start", hosts=1)
    tracemalloc.start()
    for step in range(300):
        journal.write("done", state="training", step=step, processes=dict(processes))
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 20_000, grown
    assert len(journal.read()) == 301
    journal.close()


@pytest.mark.parametrize("text", ["[]\n", "what\n", '{"event": 3}\n'])
def test_a_file_that_is_no_journal_is_refused(tmp_path, text):
    (tmp_path / "journal.jsonl").write_text(text)
    with pytest.raises(ValueError, match="journal.jsonl:1 is no line"):
        read_journal(tmp_path / "journal.jsonl")
