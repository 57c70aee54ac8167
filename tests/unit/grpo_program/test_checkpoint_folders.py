"""Names, the tracker, and what a cut-short save leaves; and the sentence on a checkpoint of another model."""

import pytest

from megatron.grpo.checkpoint_check import compare_shapes
from megatron.grpo.checkpoint_folders import (
    RELEASE, TRACKER, checkpoint_folder, commit_partial, drop_previous, find_checkpoint, open_partial, read_tracker,
    write_tracker,
)


def save(folder, iteration, text="new"):
    partial = open_partial(folder, iteration)
    (partial / "metadata.json").write_text(text)
    return commit_partial(partial, folder, iteration)


def test_a_saved_checkpoint_is_the_latest(tmp_path):
    assert find_checkpoint(tmp_path) is None and read_tracker(tmp_path / "nowhere") is None
    assert save(tmp_path, 10) == tmp_path / "iter_0000010"
    assert find_checkpoint(tmp_path) == (tmp_path / "iter_0000010", 10)
    save(tmp_path, RELEASE)
    assert find_checkpoint(tmp_path) == (tmp_path / "release", RELEASE)
    assert find_checkpoint(tmp_path, 10) == (tmp_path / "iter_0000010", 10)


def test_a_missing_or_incomplete_checkpoint_is_named(tmp_path):
    save(tmp_path, 3)
    with pytest.raises(ValueError, match="--ckpt-step 4 asks for .*iter_0000004, which is missing or incomplete"):
        find_checkpoint(tmp_path, 4)
    checkpoint_folder(tmp_path, 5).mkdir()
    write_tracker(tmp_path, 5)
    with pytest.raises(ValueError, match=f"{TRACKER} names .*iter_0000005"):
        find_checkpoint(tmp_path)
    (tmp_path / TRACKER).write_text("soon")
    with pytest.raises(ValueError, match="holds 'soon', not the number of a step"):
        read_tracker(tmp_path)


def test_what_a_killed_save_left_is_ignored_and_then_replaced(tmp_path):
    save(tmp_path, 1)
    left = open_partial(tmp_path, 2)
    (left / "half").write_text("")
    assert find_checkpoint(tmp_path) == (tmp_path / "iter_0000001", 1)
    assert list(open_partial(tmp_path, 2).iterdir()) == []
    open_partial(tmp_path, 3)
    assert not left.exists()


def test_the_same_step_again_replaces_and_a_gap_is_mended(tmp_path):
    final = save(tmp_path, 1, "old")
    save(tmp_path, 1, "newer")
    assert (final / "metadata.json").read_text() == "newer"
    final.rename(tmp_path / "iter_0000001.replaced")  # killed between the two renames of a replacement
    assert find_checkpoint(tmp_path) == (final, 1) and (final / "metadata.json").read_text() == "newer"
    (tmp_path / "iter_0000001.replaced").mkdir()  # killed before the old one was removed
    find_checkpoint(tmp_path)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["iter_0000001", TRACKER]


def test_retention(tmp_path):
    for step in range(1, 8):
        previous = read_tracker(tmp_path)
        save(tmp_path, step)
        drop_previous(tmp_path, previous, step, 3)
    assert [path.name for path in sorted(tmp_path.glob("iter_*"))] == ["iter_0000003", "iter_0000006", "iter_0000007"]


def test_the_sentence_names_the_first_that_differ():
    wanted = {f"layers.{n}.w": (4, 4) for n in range(12)}
    stored = wanted | {"layers.2.w": (4, 5), "layers.10.w": (8, 4), "extra": (1,)}
    del stored["layers.11.w"]
    assert compare_shapes("here", wanted, wanted) is None
    sentence = compare_shapes("here", stored, wanted)
    assert "extra is [1] there and missing here; layers.2.w is [4, 5] there and [4, 4] here; layers.10.w" in sentence
    assert sentence.endswith("and 1 more differ") and "--model-preset" in sentence
