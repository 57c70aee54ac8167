"""metrics.jsonl tells one run's story with each step once, whatever crashed and resumed; bad records change nothing."""

import json

import pytest
from hypothesis import given, settings, strategies

from longstraw.receipts.metrics import MetricsWriter, open_tensorboard, read_metrics

from receipt_samples import make_record as record


class Recorded:
    """Stands where TensorBoard's writer or a W&B run is passed in."""

    def __init__(self):
        self.calls = []

    def add_scalar(self, tag, value, step):
        self.calls.append((tag, value, step))

    def log(self, values, step):
        self.calls.append((values, step))

    def flush(self):
        pass


def test_each_step_is_one_line_on_disk_at_once(tmp_path):
    with MetricsWriter(tmp_path / "run") as writer:
        writer.write(record(1))
        assert json.loads((tmp_path / "run/metrics.jsonl").read_text()) == record(1)
        writer.write(record(2, eval_reward_mean=0.5, note="warm", extra=None))
    assert read_metrics(writer.path) == [record(1), record(2, eval_reward_mean=0.5, note="warm", extra=None)]


@settings(max_examples=40, deadline=None)
@given(steps=strategies.integers(1, 6), resumed=strategies.integers(1, 7), torn=strategies.integers(0, 200))
def test_a_resumed_run_reads_as_one_that_never_stopped(tmp_path_factory, steps, resumed, torn):
    folder = tmp_path_factory.mktemp("run")
    with MetricsWriter(folder) as writer:
        for step in range(1, steps + 1):
            writer.write(record(step))
    with open(writer.path, "a") as file:  # what a crash in the middle of a write leaves
        file.write(json.dumps(record(steps + 1))[:torn])
    with MetricsWriter(folder, resumed_step=resumed) as writer:
        writer.write(record(resumed + 1, seconds=9.0))
    kept = list(range(1, min(steps, resumed) + 1))
    assert [line["step"] for line in read_metrics(writer.path)] == [*kept, resumed + 1]
    assert read_metrics(writer.path)[-1]["seconds"] == 9.0


def test_a_new_run_starts_the_file_anew(tmp_path):
    for _ in range(2):
        with MetricsWriter(tmp_path) as writer:
            writer.write(record(1))
    assert read_metrics(writer.path) == [record(1)]


def test_a_file_damaged_in_the_middle_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record(1)) + "\n{broken\n" + json.dumps(record(2)) + "\n")
    with pytest.raises(ValueError, match="line 2 is not a step's metrics"):
        MetricsWriter(tmp_path, resumed_step=2)


def test_other_ranks_check_and_write_no_file(tmp_path):
    with MetricsWriter(tmp_path / "run", rank=1) as writer:
        writer.write(record(1))
        with pytest.raises(ValueError):
            writer.write({"step": 2})
    assert not (tmp_path / "run").exists()


def test_a_new_run_keeps_the_metrics_of_an_earlier_one(tmp_path):
    for steps in (3, 2, 1):
        with MetricsWriter(tmp_path) as writer:
            for step in range(1, steps + 1):
                writer.write(record(step))
    lengths = {path.name: len(path.read_text().splitlines()) for path in tmp_path.glob("metrics*.jsonl")}
    assert lengths == {"metrics-1.jsonl": 3, "metrics-2.jsonl": 2, "metrics.jsonl": 1}


def test_a_mirror_may_be_on_another_rank(tmp_path):
    """Megatron's W&B run is on the last rank, the file on the first."""
    wandb = Recorded()
    with MetricsWriter(tmp_path / "run", rank=1, wandb=wandb) as writer:
        writer.write(record(1))
    assert len(wandb.calls) == 1 and not (tmp_path / "run").exists()


@pytest.mark.parametrize("changes, message", [
    ({"loss": float("nan")}, "metric loss of step 4 is nan"),
    ({"grad_norm": float("inf")}, "metric grad_norm of step 4 is inf"),
    ({"extra": float("nan")}, "metric extra"),
    ({"seconds": None}, "metric seconds is None"),
    ({"kl": "0.1"}, "metric kl"),
    ({"kl": True}, "metric kl"),
    ({"eval_reward_mean": None}, "metric eval_reward_mean"),
    ({"extra": [1]}, "metric extra"),
    ({"peak_bytes": 1.5}, "metric peak_bytes"),
    ({"peak_bytes": -1}, "metric peak_bytes"),
    ({"step": 3}, "step 3 come after those of step 3"),
    ({"step": 2.0}, "metric step"),
])
def test_a_bad_record_is_refused_and_changes_nothing(tmp_path, changes, message):
    with MetricsWriter(tmp_path) as writer:
        writer.write(record(3))
        with pytest.raises(ValueError, match=message):
            writer.write(record(4, **changes) if "step" not in changes else {**record(4), **changes})
        writer.write(record(4))
    assert [line["step"] for line in read_metrics(writer.path)] == [3, 4]


@pytest.mark.parametrize("key", ["step", "reward_mean", "loss", "kl", "grad_norm", "seconds", "peak_bytes"])
def test_every_required_key_is_required(tmp_path, key):
    incomplete = record(1)
    del incomplete[key]
    with MetricsWriter(tmp_path) as writer, pytest.raises(ValueError, match=f"lack {key}"):
        writer.write(incomplete)


def test_a_step_that_was_rolled_back_has_nulls(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=(mirror := Recorded())) as writer:
        writer.write(record(1, loss=None, kl=None, grad_norm=None, reward_mean=None))
    assert read_metrics(writer.path)[0]["loss"] is None
    assert {tag for tag, _, _ in mirror.calls} == {"train/seconds", "train/peak_bytes"}


def test_mirrors_get_the_numbers(tmp_path):
    tensorboard, wandb = Recorded(), Recorded()
    with MetricsWriter(tmp_path, tensorboard=tensorboard, wandb=wandb) as writer:
        writer.write(record(2, eval_reward_mean=0.5, note="text"))
    assert ("eval/reward_mean", 0.5, 2) in tensorboard.calls and ("train/reward_mean", 0.2, 2) in tensorboard.calls
    assert all("note" not in tag for tag, _, _ in tensorboard.calls)
    assert wandb.calls == [({key: value for key, value in record(2, eval_reward_mean=0.5, note="text").items()
                             if key != "step"}, 2)]


def test_tensorboard_shows_a_resumed_run_without_the_steps_run_again(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resumed, steps, loss in ((0, (1, 2, 3), 1.0), (1, (2, 3), 2.0)):
        board = open_tensorboard(tmp_path / "tensorboard", resumed)
        with MetricsWriter(tmp_path, resumed_step=resumed, tensorboard=board) as writer:
            for step in steps:
                writer.write(record(step, loss=loss))
        board.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("train/loss")
    assert [(event.step, event.value) for event in events] == [(1, 1.0), (2, 2.0), (3, 2.0)]
