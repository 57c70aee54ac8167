"""tools/plot_rewards.py: which numbers it draws, and what it refuses."""

import json

import pytest

from tools.plot_rewards import average, held_out, main, read_runs, training


def write_run(folder, rewards, evaluations):
    folder.mkdir()
    records = [{"step": step, "reward_mean": reward} for step, reward in enumerate(rewards, 1)]
    records[0]["eval_reward_mean_before"] = 0.25
    for step, reward in evaluations.items():
        records[step - 1]["eval_reward_mean"] = reward
    (folder / "metrics.jsonl").write_text("".join(json.dumps(full_record(r)) + "\n" for r in records))
    return records


def full_record(record):
    rest = ("response_tokens_mean", "truncated_fraction", "loss", "kl", "grad_norm", "ratio_mean", "seconds")
    return {"peak_bytes": 1, "learning_rate": 0.0} | dict.fromkeys(rest, 0.0) | record


def test_curves(tmp_path):
    first = write_run(tmp_path / "a", [0.0, 0.5, 1.0], {1: 0.3, 3: 0.6})
    second = write_run(tmp_path / "b", [1.0, 1.0, 1.0], {3: 0.8})
    assert held_out(first) == {0: 0.25, 1: 0.3, 3: 0.6}
    assert training(first, 2) == {1: 0.0, 2: 0.25, 3: 0.75}
    assert average([held_out(first), held_out(second)]) == {0: 0.25, 3: pytest.approx(0.7)}
    assert list(read_runs([f"x={tmp_path / 'a'}", f"y={tmp_path / 'b'}", f"x={tmp_path / 'b'}"])) == ["x", "y"]


def test_a_picture_and_a_table(tmp_path, capsys):
    write_run(tmp_path / "a", [0.0, 0.5, 1.0], {3: 0.6})
    write_run(tmp_path / "b", [0.0, 0.5], {})
    picture = tmp_path / "new" / "rewards.png"
    assert main([f"Adam={tmp_path / 'a'}", f"LoGRA={tmp_path / 'b'}", "--output", str(picture)]) == 0
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Adam") and lines[0].endswith("0: 0.250, 3: 0.600") and len(lines) == 2


@pytest.mark.parametrize("bad, sentence", [
    (["nothing"], "nothing is not LABEL=FOLDER"), (["a=nowhere"], "nowhere has no metrics.jsonl"),
    (["a=nowhere", "--window", "0"], "--window is at least 1"),
])
def test_refusals(bad, sentence, capsys):
    with pytest.raises(SystemExit):
        main(bad)
    assert sentence in capsys.readouterr().err
