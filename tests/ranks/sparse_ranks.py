"""The ranks of `test_sparse_ranks.py`: selection and sparse attention over 4 ranks and over pairs, float64, no Megatron.

Every rank draws the whole sequence from one seed, works on its own part, and compares with the naive form on the whole.
"""

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from longstraw.attention.layout import BlockLayout, plan_blocks
from longstraw.attention.naive_sparse import naive_scores, naive_selection
from longstraw.attention.selection import SelectionGeometry, select
from tests.support.latents import LatentCase, TensorPages, Walk, check_walk
from tests.support.ranks import fork_ranks


def check_case(case: LatentCase, cut: Walk, group, unit: int = 1):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    plan = [
        plan_blocks(start, length, cut.block, ranks, rank, unit, group)
        for start, length in ((0, case.shared), (case.shared, case.own))
    ]
    check_walk(case, cut, plan)


def check_choice(quantum, rotation, group):
    """What all ranks together select for each query is what a full sort selects, and nothing twice."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    case = LatentCase(0, 80, 2, top_k=9, quantum=quantum)
    t, start, length = case.draw(), 59, 21
    layout = BlockLayout(start, length, ranks, rank, rotation, 1, group)
    share = torch.arange(start)[torch.arange(start) % (ranks + 1) == rank]  # some keys of the history are nobody's
    pages = TensorPages(t["index_k"][:, share], share)
    at = layout.start + layout.slot * layout.rows
    rows = slice(at, at + layout.rows)
    index_q = pad(t["index_q"], (0, 0, 0, 9))[:, :, rows]
    weights = pad(t["weights"], (0, 9))[:, :, rows]
    own = slice(start + layout.first, start + layout.first + layout.mine)
    geometry = SelectionGeometry(layout, 9, True, 2, (pages,), keys_at_once=7)
    found = select(index_q, weights, t["index_k"][:, own], geometry)
    chosen = torch.zeros(2, layout.ranks * layout.rows, 80, dtype=torch.int64)
    for (a, b), sources in zip(layout.sub_blocks(2), found.parts, strict=True):
        queries = (torch.arange(ranks)[:, None] * layout.rows + torch.arange(a, b)).flatten()
        for picked, positions in zip(sources, (share, torch.arange(own.start, own.stop)), strict=True):
            for i, w, _ in (picked >= 0).nonzero().unique(dim=0).tolist():
                chosen[i, queries[w], positions[picked[i, w, :][picked[i, w, :] >= 0].long()]] = 1
    dist.all_reduce(chosen, group=group)
    mask = case_mask_without(t, torch.arange(start) % (ranks + 1) == ranks, start, length)
    assert torch.equal(chosen[:, :length], mask.long()), (quantum, rotation)


def case_mask_without(t, nobody, start, length):
    """The naive selection of the block's queries, where some keys do not exist."""
    there = torch.cat([(~nobody).nonzero()[:, 0], torch.arange(start, start + length)])
    block = slice(start, start + length)
    scores = naive_scores(t["index_q"][:, :, block], t["weights"][:, :, block], t["index_k"][:, there], True)
    mask = torch.zeros(2, length, start + length, dtype=torch.bool)
    mask[:, :, there] = naive_selection(scores, torch.arange(start, start + length), there, 9)
    return mask


WALKS = (
    (LatentCase(23, 9, 2, quantum=2.0), Walk(block=7, rows_at_once=1, reselect=True), 1),
    (LatentCase(9, 5, top_k=1), Walk(block=1, reselect=True), 1),
    (LatentCase(9, 5, 3, top_k=100), Walk(block=14), 1),
    (LatentCase(17, 8, 2, top_k=6, quantum=1.0), Walk(block=5, elements_at_once=12, kept=True), 3),
    (LatentCase(0, 2), Walk(block=2, kept=True, reselect=True), 1),
    (LatentCase(1, 1), Walk(block=4), 1),
    (LatentCase(40, 10, relu=False, top_k=11), Walk(block=16, rows_at_once=2, keys_at_once=3, scores_at_once=9), 1),
    (LatentCase(23, 9, 2, top_k=1000), Walk(block=7, dense=True, exchange="queries"), 1),
    (LatentCase(23, 9, 2, top_k=1000), Walk(block=7, dense=True, exchange="keys", kept=True), 1),
    (LatentCase(23, 9, 2), Walk(block=7, indexer=True), 1),
    (LatentCase(9, 5, top_k=1), Walk(block=1, indexer=True), 1),
    (LatentCase(17, 8, 2, top_k=6, quantum=1.0), Walk(block=5, elements_at_once=12, indexer=True), 3),
    (LatentCase(40, 10, relu=False, top_k=11), Walk(block=16, rows_at_once=2, indexer=True), 1),
    (LatentCase(9, 6, 2, top_k=1000), Walk(block=7, dense=True, rows_at_once=1, indexer=True), 1),
)
IN_PAIRS = (3, 7, 8, 11)
"""Of these, the walks that a pair of the four ranks takes too: its ranks' numbers in the group are not those in the world."""


def main(rank, ranks, _):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    world, pair = dist.group.WORLD, pairs[rank // 2]
    for group, quanta, walks in ((world, (None, 0.7, 100.0), WALKS), (pair, (0.7,), [WALKS[i] for i in IN_PAIRS])):
        for quantum in quanta:
            for rotation in range(dist.get_world_size(group)) if quantum == 0.7 else (1,):
                check_choice(quantum, rotation, group)
        for case, cut, unit in walks:
            check_case(case, cut, group, unit)
            if rank == 0:
                print(dist.get_world_size(group), case, cut, flush=True)


if __name__ == "__main__":
    fork_ranks(main)
