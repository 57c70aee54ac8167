"""One rank of `test_foreseen_receipts.py`: the training program, two steps whose responses have one token each.

    receipt_ranks.py 2 RENDEZVOUS FOLDER MODEL_AND_SWEEP_FLAGS...
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.ranks.training_ranks import Runner
from tests.support.ranks import fork_ranks


def main(rank: int, ranks: int, arguments: list[str]) -> None:
    """The run; its receipts are the test's to read."""
    folder, *flags = arguments
    runner = Runner(rank, ranks, Path(folder))
    runner.run("run", " ".join([*flags, "--train-iters 2 --max-response-length 1"]))
    runner.end()


if __name__ == "__main__":
    fork_ranks(main)
