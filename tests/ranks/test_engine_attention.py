"""Exchanges and paged attention over 3 ranks equal the naive form on the whole sequence; see attention_ranks.py."""

from pathlib import Path

import pytest

from tests.support.ranks import run_on_ranks

HERE = Path(__file__).parent


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_attention_over_three_ranks(tmp_path):
    run_on_ranks(HERE / "attention_ranks.py", 3, tmp_path)


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_a_failing_rank_ends_the_others(tmp_path):
    """The launcher of these tests: one rank raises while the other sleeps; all end at once, and the reason is shown."""
    script = tmp_path / "fails.py"
    script.write_text(
        "import time\nfrom tests.support.ranks import fork_ranks\n"
        "def main(rank, ranks, arguments):\n"
        "    time.sleep(600 * (1 - rank))\n    raise RuntimeError(f'rank {rank} gives up')\n"
        "fork_ranks(main)\n"
    )
    with pytest.raises(AssertionError, match="(?s)exit code 1.*rank 1 gives up"):
        run_on_ranks(script, 2, tmp_path)
