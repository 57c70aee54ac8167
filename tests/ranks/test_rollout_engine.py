"""Groups through a rollout engine, in training on 2 gloo ranks and alone in one process: what the resident run sampled, to
the bit, and failures that all ranks agree on."""

from pathlib import Path

import pytest

from tests.support.ranks import REPOSITORY, run_forked, run_on_ranks

pytestmark = [pytest.mark.ranks(seconds=60), pytest.mark.timeout(900)]


def test_engine_and_generation_alone(tmp_path):
    """Every scenario of rollout_engine_ranks.py, then of rollout_only_run.py on the store that they left."""
    run_forked(
        REPOSITORY / "examples" / "recall" / "make_data.py",
        ["--output", tmp_path / "data", "--prompt-tokens", 47, "--num-facts", 4, "--num-train", 16, "--num-eval", 3], tmp_path,
    )
    run_on_ranks(Path(__file__).with_name("rollout_engine_ranks.py"), 2, tmp_path, [str(tmp_path)], seconds=500)
    run_forked(Path(__file__).with_name("rollout_only_run.py"), [tmp_path], tmp_path, seconds=300)
