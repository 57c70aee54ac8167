"""What a person gets to see: phases, terminal lines, the closing table, the picture, and the folder of a run."""

import io
import time
from dataclasses import replace

import pytest
from receipt_samples import make_receipt, make_record

from longstraw.receipts.console import RunConsole, format_bytes, format_seconds, format_step, summarize_run
from longstraw.receipts.phases import PhaseClock
from longstraw.receipts.plots import plot_run, smooth, split_memory
from longstraw.receipts.receipt import RankMemory, Topology
from longstraw.receipts.recorder import RunRecorder


@pytest.fixture(autouse=True)
def terminal_kind(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def read_png_size(path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(header[16:20]), int.from_bytes(header[20:24])


def test_phases_add_up_also_when_one_raises():
    seen, synchronized = [], []
    clock = PhaseClock(lambda: synchronized.append(1), on_switch=seen.append)
    for _ in range(2):
        with clock.phase("replay"):
            time.sleep(0.02)
    with pytest.raises(RuntimeError), clock.phase("commit"):
        raise RuntimeError
    assert seen == ["replay", None, "replay", None, "commit", None] and set(clock.seconds) == {"replay", "commit"}
    assert 0.04 <= clock.seconds["replay"] < 1 and clock.current is None
    assert len(synchronized) == 5, "both ends of each whole phase; only the start of one that raised"


def test_a_phase_inside_a_phase_interrupts_it():
    seen = []
    clock = PhaseClock(on_switch=seen.append)
    started = time.perf_counter()
    with clock.phase("replay"), pytest.raises(RuntimeError), clock.phase("responses"):
        time.sleep(0.05)
        raise RuntimeError
    whole = time.perf_counter() - started
    assert seen == ["replay", "responses", "replay", None]
    assert clock.seconds["responses"] >= 0.05 > clock.seconds["replay"]
    assert sum(clock.seconds.values()) == pytest.approx(whole, abs=0.01)


def test_off_a_terminal_a_step_is_one_plain_line():
    stream = io.StringIO()
    with RunConsole(12, stream=stream) as console:
        console.show_phase("replay")
        console.show_step(make_record(3, eval_reward_mean=0.75, loss=None))
        console.say("[not markup]")
    console.show_table("run", [("steps", "3"), ("peak memory", "1 KiB")])
    lines = stream.getvalue().splitlines()
    assert lines[0] == ("step  3/12  reward 0.300  loss -  kl 0.00e+00  grad norm 1.5  2 s  peak 1003 bytes  held-out 0.750")
    assert lines[1:] == ["[not markup]", "run", "  steps        3", "  peak memory  1 KiB"]


def test_on_a_terminal_there_is_a_bar_with_the_phase():
    stream = Terminal()
    with RunConsole(2, stream=stream) as console:
        console.show_phase("capture")
        deadline = time.monotonic() + 20
        while "capture" not in stream.getvalue() and time.monotonic() < deadline:  # drawn ten times a second
            time.sleep(0.05)
        console.show_step(make_record(1))
        console.show_step(make_record(2))
    console.show_table("run", [("steps", "2")])
    shown = stream.getvalue()
    assert all(text in shown for text in ("2/2", "reward 0.200", "capture", "done", "step 1/2", "\x1b["))


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with RunConsole(2, stream=stream) as console:
        console.show_step(make_record(1))
    assert stream.getvalue().count("\n") == 1 and "\x1b" not in stream.getvalue()


def test_an_interrupted_bar_says_so():
    stream = Terminal()
    with pytest.raises(RuntimeError), RunConsole(2, stream=stream) as console:
        console.show_step(make_record(1))
        raise RuntimeError
    assert "stopped" in stream.getvalue() and "1/2" in stream.getvalue()


def test_other_ranks_are_silent():
    stream = Terminal()
    with RunConsole(2, rank=1, stream=stream) as console:
        console.show_phase("capture")
        console.show_step(make_record(1))
    console.show_table("run", [("steps", "2")])
    assert stream.getvalue() == ""


def test_numbers_read_as_a_person_writes_them():
    assert [format_bytes(n) for n in (0, 1023, 1536, 5 << 20, 97_503_000_000)] == ["0 bytes", "1023 bytes", "1.5 KiB", "5 MiB",
                                                                                   "90.81 GiB"]
    assert [format_seconds(s) for s in (0.0123, 2, 89, 150, 3725, 7140)] == ["0.0123 s", "2 s", "89 s", "2 min", "62 min",
                                                                             "1 h 59 min"]
    assert "step   9/100" in format_step(make_record(9), 100)


def test_the_closing_table_compares_the_ends():
    records = [make_record(step) for step in range(1, 21)]
    records[0]["eval_reward_mean"], records[-1]["eval_reward_mean"] = 0.25, 0.875
    rows = dict(summarize_run(records, {"capture": 1.0, "replay": 3.0}))
    assert rows["held-out reward"] == "0.250 (step 1) -> 0.875 (step 20)"
    assert rows["training reward"] == "0.150 -> 1.950 (first and last 2 steps)"
    assert rows["  replay"] == "3 s (75 %)" and list(rows)[-2:] == ["  replay", "  capture"]
    assert "held-out reward" not in dict(summarize_run(records[1:3], {}))
    with pytest.raises(ValueError, match="no step"):
        summarize_run([], {})


def test_smoothing_looks_back_only():
    assert smooth([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]


def test_peaks_are_split_by_category_else_by_state_else_not_at_all():
    assert split_memory(make_receipt()) == [("weights", [1000, 1000]), ("graph", [900, 900]), ("everything else", [3100, 3100])]
    plain = tuple(RankMemory(rank=rank, peak_bytes=5000, categories={}) for rank in (0, 1))
    state = make_receipt().state
    assert split_memory(make_receipt(memory=plain)) == [], "host pages are no device memory"
    on_device = (replace(state[0], residency="device"), replace(state[0], residency="device", kind="kv_adjoint", bytes=800))
    assert split_memory(make_receipt(memory=plain, state=on_device)) == [
        ("kv_adjoint", [0, 800]), ("kv_pages", [0, 400]), ("everything else", [5000, 3800])]


@pytest.mark.parametrize("ranks", [1, 2, 32])
def test_the_picture_is_drawn_for_any_number_of_ranks(tmp_path, ranks):
    memory = tuple(RankMemory(rank=rank, peak_bytes=9 << 30, categories={"weights": 5 << 30}) for rank in range(ranks))
    receipt = make_receipt(memory=memory, state=(), topology=Topology(
        world_size=ranks, tensor_model_parallel_size=1, context_parallel_size=ranks, data_parallel_size=1, backend="gloo",
        device="cpu"))
    plot_run(tmp_path / "run.png", [make_record(1, eval_reward_mean=0.1)], receipt, title="one step")
    width, height = read_png_size(tmp_path / "run.png")
    assert width > 1200 and height > 400
    assert [path.name for path in tmp_path.iterdir()] == ["run.png"]


def test_the_picture_needs_no_receipt_and_no_reward_but_a_step(tmp_path):
    plot_run(tmp_path / "run.png", [make_record(1, reward_mean=None, peak_bytes=0)])
    plain = tuple(RankMemory(rank=rank, peak_bytes=0, categories={}) for rank in (0, 1))
    plot_run(tmp_path / "run.png", [make_record(1)], make_receipt(memory=plain, state=()))
    read_png_size(tmp_path / "run.png")
    with pytest.raises(ValueError, match="no step to draw"):
        plot_run(tmp_path / "none.png", [])
    plot_run(tmp_path / "other.png", [make_record(1)], rank=1)
    assert [path.name for path in tmp_path.iterdir()] == ["run.png"]


def test_a_run_leaves_its_whole_folder(tmp_path, capsys):
    for rank in (1, 0):
        with RunRecorder(tmp_path / "run", last_step=2, rank=rank) as recorder:
            for step in (1, 2):
                with recorder.clock.phase("replay"):
                    pass
                recorder.record_step(make_record(step))
            recorder.finish(make_receipt(), title="tiny")
        if rank:
            assert not (tmp_path / "run").exists() and capsys.readouterr().out == ""
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["metrics.jsonl", "receipt.json", "run.png", "tensorboard"]
    shown = capsys.readouterr().out
    assert "step 2/2" in shown and "semantics        exact" in shown
