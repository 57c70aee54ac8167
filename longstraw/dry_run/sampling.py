"""An engine that runs some blocks of a segment and accounts for the rest.

Blocks of a segment are alike but for the pages before them, so a dry run executes the first, the second and the last, and the two
between which attention changes what it passes between ranks. Of a block that is left out the state that
it would leave is stored all the same (pages, boundary states, kept outputs), from the last block that ran, and dropped where
the reverse sweep would drop it: no peak is missed that these blocks would have had. Its operations are counted by the
blocks that ran, between which they grow evenly. Of responses of one shape the first two run.

The first and the last block of every other shape run too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from longstraw.adapters.full_attention import FullAttentionAdapter
from longstraw.adapters.latent_attention import LatentAttentionAdapter
from longstraw.attention.exchange import gather_tokens
from longstraw.attention.geometry import AttentionGeometry
from longstraw.dry_run.watch import Watch
from longstraw.prompt_state.pages import PageArena
from longstraw.segments import BlockLoss, Segment, SegmentState
from longstraw.sweeps import ReplayEngine

RUN_ALIKE = 2
"""Segments of one shape that run; the others after them are counted only."""


class SampledEngine(ReplayEngine):
    """A ReplayEngine under a watch. every_block: run all of them, as the real engine does."""

    def __init__(self, *args, watch: Watch, every_block: bool, **kwargs):
        super().__init__(*args, **kwargs)
        self.watch, self.every_block = watch, every_block
        self._alike: dict[tuple, int] = {}
        self._counted: dict[tuple, tuple] = {}

    def choose_blocks(self, state: SegmentState, blocks: int) -> dict[int, float]:
        """The blocks among the first `blocks` that run -> how many each stands for, itself included."""
        if self.every_block or blocks <= 3:
            return dict.fromkeys(range(blocks), 1.0)
        chosen = {0, 1, blocks - 1}
        for block in self._find_changes(state, blocks):
            chosen |= {block - 1, block}
        live = [block for block in range(blocks) if self.keeps_graph(state, block)]
        chosen |= {*live, *(block - 1 for block in live[:1] if block)}  # what runs again does not stand for what does not
        first, last = {}, {}
        for block in range(blocks):
            first.setdefault(shape_of(state, block), block)
            last[shape_of(state, block)] = block  # it reads the most pages of its shape
        return spread_weights(sorted({*chosen, *first.values(), *last.values()}))

    def _find_changes(self, state: SegmentState, blocks: int) -> list[int]:
        """The first block of each new way to attend, by bisection: a way that is left is not taken again."""
        found, low = [], 0
        while (way := self._way_to_attend(state, low)) != self._way_to_attend(state, blocks - 1):
            below, above = low, blocks - 1
            while above - below > 1:
                middle = (below + above) // 2
                below, above = (middle, above) if self._way_to_attend(state, middle) == way else (below, middle)
            found.append(above)
            low = above
        return found

    def _way_to_attend(self, state: SegmentState, block: int) -> tuple:
        """Whether keys or queries are passed between ranks, and whether keys are selected."""
        layout, found = state.plan[block], []
        for adapter in {type(adapter): adapter for adapter in self.mixers}.values():
            config = adapter.module.config
            tp, end = config.tensor_model_parallel_size, layout.start + layout.length
            if isinstance(adapter, FullAttentionAdapter):
                heads, groups, width = config.num_attention_heads // tp, config.num_query_groups // tp, config.kv_channels
            elif isinstance(adapter, LatentAttentionAdapter):
                found.append(end > adapter.module.index_topk)
                heads, groups, width = config.num_attention_heads, 1, config.kv_lora_rank + config.qk_pos_emb_head_dim
                if found[-1]:
                    continue
            else:
                continue
            dtype = next(self.model.parameters()).dtype
            q, k = _Shape((state.batch, heads, layout.rows, width), dtype), _Shape((state.batch, groups, 0, width), dtype)
            pages = [_Pages(a.rows_of_ranks_before(len(a.plan)), a.constant, a.batch) for a in state.ancestors()]
            pages.append(_Pages(state.rows_of_ranks_before(block), False, state.batch))
            geometry = AttentionGeometry(layout, 1.0, self.policy.rows_at_once, tuple(pages), self.policy.attention_exchange)
            found.append(geometry.passes_keys(q, k, k))
        return tuple(found)

    @torch.no_grad()
    def forward_sweep(self, segment: Segment, parent: SegmentState | None, *, constant: bool = False, for_replay: bool = False):
        """See ReplayEngine."""
        with self.watch.phase("capture" if segment.captures_only else "score"):
            if self.every_block:
                return super().forward_sweep(segment, parent, constant=constant, for_replay=for_replay)
            state = self.open_segment(segment, parent, constant=constant, for_replay=for_replay)
            with self._once_of_many("score", segment, parent) as again:
                if again:
                    return state, torch.zeros(segment.inputs.shape, device=segment.inputs.device)
                logprobs = self._run_blocks(segment, state, len(state.plan))
            return state, torch.cat(logprobs, 1) if logprobs else None

    @torch.no_grad()
    def _run_blocks(self, segment: Segment, state: SegmentState, blocks: int) -> list[torch.Tensor]:
        """See ReplayEngine; blocks that were not chosen are left what one like them has left."""
        if self.every_block:
            return super()._run_blocks(segment, state, blocks)
        chosen, left, logprobs = self.choose_blocks(state, blocks), {}, []
        followed = self._followed(state, blocks, chosen)
        for block in range(blocks):
            shape = shape_of(state, block)
            if block not in chosen:
                with self.watch.standing_for(0.0):
                    self.stand_in(left[shape], state, block)
                    if segment.targets is not None:
                        logprobs.append(logprobs[-1].clone())
                continue
            left.pop(shape, None)
            with self.watch.standing_for(chosen[block]):
                hidden, runs = self.pass_block(segment, state, block)
                if block in followed:
                    left[shape] = runs
                del runs
                if segment.targets is not None:
                    own = self._logprobs(segment, state, block, hidden)
                    logprobs.append(gather_tokens(own, state.plan[block]))
        return logprobs

    def _followed(self, state: SegmentState, blocks: int, chosen: Mapping[int, float]) -> set[int]:
        """The chosen blocks whose next one of the same shape is left out."""
        found, latest = set(), {}
        for block in range(blocks):
            shape = shape_of(state, block)
            if block in chosen:
                latest[shape] = block
            else:
                found.add(latest[shape])
        return found

    @torch.no_grad()
    def pass_block(self, segment: Segment, state: SegmentState, block: int):
        """`run_forward`, with what each layer has left -> (hidden, adapter's key -> run)."""
        hidden, runs = self._run_forward(segment, state, block)
        self.stand_in(runs, state, block)
        return hidden, runs

    def stand_in(self, runs: dict, state: SegmentState, block: int) -> None:
        """Store as a block's state what the runs of a block like it have left."""
        for adapter in self.adapters:
            adapter.capture(runs[adapter.key], state, block)

    def stand_in_and_forget(self, runs: dict, state: SegmentState, first: int, last: int) -> None:
        """Leave what decoding the blocks from first to last leaves, from the runs of a block like the last: the rows of all of
        them and the last one's end. Each is forgotten once the next has run."""
        skipped = sum(state.plan[block].mine for block in range(first, last))
        for held in state.layers.values():
            for pages in vars(held).values():
                if isinstance(pages, PageArena):
                    pages.rows += skipped
        self.stand_in(runs, state, last)
        self.forget_block(state, first)
        self.forget_block(state, last)

    def reverse_sweep(self, segment: Segment, state: SegmentState) -> float:
        """See ReplayEngine."""
        with self.watch.phase("prompt_reverse" if segment.captures_only else "responses"):
            return super().reverse_sweep(segment, state)

    def _reverse_blocks(self, segment: Segment, state: SegmentState, blocks: int, total: float) -> float:
        """See ReplayEngine; blocks that were not chosen are only forgotten."""
        if self.every_block:
            return super()._reverse_blocks(segment, state, blocks, total)
        chosen = self.choose_blocks(state, blocks)
        for block in reversed(range(blocks)):
            if block not in chosen:
                with self.watch.standing_for(0.0):
                    self.forget_block(state, block)
                continue
            with self.watch.standing_for(chosen[block]):
                total += self._reverse_block(segment, state, block)
        return total

    def score_and_replay(
        self, segment: Segment, parent: SegmentState | None, make_loss: Callable[[torch.Tensor], BlockLoss]
    ) -> float:
        """See ReplayEngine."""
        with self.watch.phase("responses"):
            if self.every_block:
                return super().score_and_replay(segment, parent, make_loss)
            with self._once_of_many("replay", segment, parent) as again:
                if again:
                    make_loss(torch.zeros(segment.inputs.shape, device=segment.inputs.device))
                    return 0.0
                return super().score_and_replay(segment, parent, make_loss)

    @contextmanager
    def _once_of_many(self, kind: str, segment: Segment, parent: SegmentState | None) -> Iterator[bool]:
        """A block in which a segment runs; True where enough of its shape have run after a parent like this one. All count what
        the first of them has counted."""
        if segment.captures_only:
            yield False
            return
        key = (kind, tuple(segment.inputs.shape), None if parent is None else (parent.end, parent.constant))
        self._alike[key] = self._alike.get(key, 0) + 1
        counter = self.watch.counter
        if self._alike[key] > 1:  # counted once, as the first
            if counter is not None:
                counter.count_again(self._counted[key])
            with self.watch.standing_for(0.0):
                yield self._alike[key] > RUN_ALIKE
            return
        before = None if counter is None else counter.note()
        yield False
        if counter is not None:
            self._counted[key] = counter.since(before)


def spread_weights(chosen: Sequence[int]) -> dict[int, float]:
    """Sorted numbers -> how much each counts, so that a cost that is linear between neighbours adds up to that of all."""
    weights = dict.fromkeys(chosen, 1.0)
    for first, second in zip(chosen, chosen[1:]):
        for end in (first, second):
            weights[end] += (second - first - 1) / 2
    return weights


def shape_of(state: SegmentState, block: int) -> tuple[int, int, int]:
    """A block's tokens, rows, and rows with tokens of this rank."""
    layout = state.plan[block]
    return layout.length, layout.rows, layout.mine


class _Shape:
    """As much of a tensor as the choice of an exchange reads."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype):
        self.shape, self._size = shape, dtype.itemsize

    def element_size(self) -> int:
        return self._size


@dataclass(frozen=True)
class _Pages:
    """As much of a view of pages as the choice of an exchange reads, before any block has written them."""

    rows_of_ranks: tuple[int, ...]
    constant: bool
    batch: int
