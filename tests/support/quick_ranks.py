"""A rank of `quick_sides`' trainer on several hosts, under torchrun: the ranks add up what each has seen, and the first commits.

    quick_ranks.py RUN_DIR STEP
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.quick_sides import first_rank, pass_through  # noqa: E402


def main(folder: Path, step: int) -> None:
    """One step; the other ranks wait for the first in a collective, as ranks do that have nothing of their own to write."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == int(os.environ["WORLD_SIZE"])
    if dist.get_rank() == 0:
        (folder / f"together-{step}").touch()
        first_rank(folder, step)
    dist.barrier()
    pass_through(folder, "ending", step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
