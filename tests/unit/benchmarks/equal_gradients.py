"""A rank's script: the gradients of the benchmark's exact update equal those of its conventional ones.

    python equal_gradients.py RANKS     under torchrun's environment
"""

import sys

import torch
import torch.distributed as dist

import longstraw.patches.process_groups as process_groups
from benchmarks.step import build_update, parse_arguments
from benchmarks.updates import draw_batch
from longstraw.patches.float64 import lift_float64
from longstraw.segments import Segment


def main() -> None:
    """Compare on rank 0; every rank takes part in the exact update."""
    ranks = int(sys.argv[1])
    groups = process_groups.initialize_groups(context_parallel=ranks)
    alone = process_groups.single_rank_groups(groups)
    process_groups.initialize_groups = lambda *, context_parallel, expert_parallel: groups if context_parallel == ranks else alone
    flags = "--dtype float64 --chunk-size 16 --block-size 4 --responses-per-replay 2 --context-parallel-size"
    args = parse_arguments([*flags.split(), str(ranks)])
    found = []
    with lift_float64():
        for run in ("conventional", "checkpointed", "exact"):
            update, model = build_update(args, run)
            update.accumulate(draw_batch(40, 7, 3, 128, 1, "cpu"))
            found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    conventional, checkpointed, exact = found
    # Megatron's recomputation runs inside an autograd function, where its float32 islands cannot be lifted
    for name, other, bar in (("checkpointed", checkpointed, 1e-5), ("exact", exact, 1e-12)):
        error = ((other - conventional).norm() / conventional.norm()).item()
        assert error < bar, f"{name}: relative error {error}"
    assert conventional.norm() > 1e-6
    refuse_children(update.engine)
    dist.barrier()
    dist.destroy_process_group()


def refuse_children(engine) -> None:
    """Scoring and replaying in one go is for leaves."""
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    parent = Segment("parent", tokens, tokens, children=[Segment("child", tokens, tokens)])
    try:
        engine.score_and_replay(parent, None, lambda logprobs: None)
    except ValueError as refusal:
        assert "segment parent has children" in str(refusal)
    else:
        raise AssertionError("a segment with children was accepted")


if __name__ == "__main__":
    main()
