"""The ranks of `test_step.py`: the gradients of the benchmark's exact update equal those of its conventional ones.

On one rank and on all of them; and what the benchmark measures of an update when it is asked for memory alone.
"""

import torch
import torch.distributed as dist

import longstraw.patches.process_groups as process_groups
from benchmarks.step import build_update, measure, parse_arguments
from benchmarks.updates import draw_batch
from longstraw.patches.float64 import lift_float64
from longstraw.segments import Segment
from tests.support.ranks import fork_ranks

FLAGS = "--dtype float64 --chunk-size 16 --block-size 4 --responses-per-replay 2 --prompt-length 40 --response-length 7 " \
        "--group-size 3 --measure memory --context-parallel-size"


def main(rank: int, ranks: int, _: list[str]) -> None:
    """Every rank has the conventional gradients, and takes part in the exact update of all."""
    groups = process_groups.initialize_groups(context_parallel=ranks)
    alone = process_groups.single_rank_groups(groups)
    process_groups.initialize_groups = lambda *, context_parallel, expert_parallel: groups if context_parallel == ranks else alone
    expected = gradient_of("conventional", 1)[0]
    assert expected.norm() > 1e-6
    # Megatron's recomputation runs inside an autograd function, where its float32 islands cannot be lifted
    for run, size, bar in (("checkpointed", 1, 1e-5), ("exact", 1, 1e-12), ("exact", ranks, 1e-12)):
        found, update = gradient_of(run, size)
        error = ((found - expected).norm() / expected.norm()).item()
        assert error < bar, f"{run} on {size} ranks: relative error {error}"
    refuse_children(update.engine)
    figures = measure(parse_arguments([*FLAGS.split(), str(ranks)]), "exact")
    assert figures["peak_bytes"] > 0 and "seconds" not in figures
    dist.barrier()


def gradient_of(run: str, ranks: int) -> tuple[torch.Tensor, object]:
    """The gradient of one update of a batch, and the update."""
    with lift_float64():
        update, model = build_update(parse_arguments([*FLAGS.split(), str(ranks)]), run)
        update.accumulate(draw_batch(40, 7, 3, 128, 1, "cpu"))
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]), update


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
    fork_ranks(main)
