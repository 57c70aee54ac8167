"""Full attention (MHA, GQA, with or without an output gate): keys and values in pages.

Only the core attention of Megatron's SelfAttention is swapped: it gets q, k, v after q/k norm and rotary embedding, and
the output gate is applied outside it. Megatron's [s, b, h, d] ends here; inside it is [B, H, S, D].
"""

from dataclasses import dataclass

import torch
from megatron.core.transformer.module import MegatronModule

from longstraw.adapters.base import EndOfCapture, LayerRun, Root, StatePolicy, prefetch_in_backward, prefetch_pages
from longstraw.attention.dual import attend_dual, has_tangent
from longstraw.attention.layout import BlockLayout
from longstraw.attention.geometry import AttentionGeometry, Exchange
from longstraw.attention.paged import attend, paged_attention
from longstraw.prompt_state.kept import KeptOutputs
from longstraw.prompt_state.ledger import LedgerEntry, foreseen
from longstraw.prompt_state.pages import PageArena, PageView
from longstraw.segments import SegmentState


@dataclass(eq=False)
class AttentionState:
    """State of one attention layer and segment: pages, and the outputs that the forward sweep kept."""

    pages: PageArena
    kept: KeptOutputs


@dataclass(eq=False)
class AttentionRun(LayerRun):
    """One block: what core attention reads (above) and leaves (below).

    k, v: own keys and values [B, G, M, D], the very tensors of the graph. output: (o, lse) of a pass without gradient.
    """

    layout: BlockLayout
    stop_here: bool
    history: tuple[PageView, ...]
    rows_at_once: int
    exchange: Exchange
    upcoming: tuple[PageView, ...] = ()
    preceding: tuple[PageView, ...] = ()
    kept: tuple[torch.Tensor, torch.Tensor] | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    output: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def read_in_forward(self) -> tuple[PageView, ...]:
        """The pages that this pass's forward reads: none where the output was kept."""
        return self.history if self.kept is None else ()

    @property
    def differentiated(self) -> tuple[PageView, ...]:
        """The pages that the backward reads."""
        return self.history


class PagedCoreAttention(MegatronModule):
    """Core attention of SelfAttention over pages; runs only while a block is bound to it."""

    def __init__(self, config, layer_number, attn_mask_type=None, attention_type=None, softmax_scale=None, **_):
        super().__init__(config=config)
        self.layer_number = layer_number
        self.softmax_scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.run: AttentionRun | None = None

    def forward(self, query, key, value, attention_mask=None, **_):
        """query [s, b, H, D], key and value [s, b, G, D] of this rank's rows -> [s, b, H * D]."""
        run = self.run
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        k, v = k[:, :, : run.layout.mine].contiguous(), v[:, :, : run.layout.mine].contiguous()
        run.k, run.v = k, v
        if run.stop_here:
            raise EndOfCapture
        prefetch_pages(run.read_in_forward, run.upcoming)
        geometry = AttentionGeometry(run.layout, self.softmax_scale, run.rows_at_once, run.history, run.exchange)
        if has_tangent(query, key, value):
            o = attend_dual(q, k, v, geometry)
        elif torch.is_grad_enabled():
            o = paged_attention(q.contiguous(), k, v, geometry, run.kept)
            prefetch_in_backward(o, run.differentiated, run.preceding)
        else:
            run.output = attend(q.contiguous(), k, v, geometry)
            o = run.output[0]
        return o.permute(2, 0, 1, 3).flatten(2)


class FullAttentionAdapter:
    """The sweeps' view of one full-attention layer."""

    def __init__(self, module: PagedCoreAttention):
        self.key = self.layer_number = module.layer_number
        self.module = module

    def open(self, segment: SegmentState, policy: StatePolicy) -> AttentionState:
        """Pages for the tokens that this rank will own."""
        rank = segment.plan[0].rank if segment.plan else 0
        where = dict(segment=segment.name, layer_number=self.layer_number, owner=rank)
        pages = PageArena(
            **where, capacity=segment.rows_before(len(segment.plan)), residency=policy.page_residency,
            adjoint_residency=policy.adjoint_residency, staging=policy.staging,
        )
        kept = KeptOutputs(**where, residency=policy.attention_output_residency)
        policy.ledger.watch(pages)
        policy.ledger.watch(kept)
        return AttentionState(pages, kept)

    def foresee(self, segment, policy, dtype, *, stops) -> list[LedgerEntry]:
        """Keys and values, their adjoints unless the segment is a constant, and the outputs that are kept."""
        config, tokens, rows = self.module.config, segment.rows_before(len(segment.plan)), segment.padded_rows
        tp, wide = config.tensor_model_parallel_size, torch.promote_types(dtype, torch.float32)
        numbers = 2 * tokens * config.num_query_groups // tp * config.kv_channels
        heads = config.num_attention_heads // tp
        found = [("kv_pages", numbers * dtype.itemsize, policy.page_residency)]
        if not segment.constant:
            found.append(("kv_adjoint", numbers * wide.itemsize, policy.adjoint_residency))
        if policy.attention_output_residency != "none" and not stops:
            kept = rows * heads * (config.kv_channels * dtype.itemsize + wide.itemsize)
            found.append(("attention_output", kept, policy.attention_output_residency))
        return foreseen(segment, self.layer_number, tokens, found)

    def history(self, segment: SegmentState, block: int) -> tuple[PageView, ...]:
        """The pages that a block attends to: all of the ancestors', and its own segment's before it."""
        return (*(self._view(a, len(a.plan), a.constant) for a in segment.ancestors()), self._view(segment, block))

    def _view(self, segment: SegmentState, blocks: int, constant: bool = False) -> PageView:
        rank = segment.plan[0].rank if segment.plan else 0
        return PageView(segment.layers[self.layer_number].pages, segment.rows_of_ranks_before(blocks), rank, constant)

    def restore(self, segment, block, policy, *, replay, stop_here, live=False) -> AttentionRun:
        """The pages before the block and, in a replay, its kept output."""
        layout, state = segment.plan[block], segment.layers[self.layer_number]
        kept = state.kept.take(block, _device(self.module)) if replay else None
        history = self.history(segment, block)
        return AttentionRun(layout, stop_here, history, policy.rows_at_once, policy.attention_exchange, kept=kept)

    def capture(self, run: AttentionRun, segment: SegmentState, block: int) -> None:
        """Append the block's keys and values; keep its output where asked."""
        state = segment.layers[self.layer_number]
        state.pages.append(run.k, run.v)
        if run.output is not None:
            state.kept.keep(block, *run.output)

    def prepare(self, segment: SegmentState) -> None:
        """Zero adjoints for the pages, on every rank, also where a rank owns none."""
        if segment.plan:
            segment.layers[self.layer_number].pages.open_adjoints(_device(self.module))

    def replay_roots(self, run: AttentionRun, segment: SegmentState, block: int) -> list[Root]:
        """The block's keys and values with the adjoints of their pages, where anything follows the block."""
        pages = segment.layers[self.layer_number].pages
        if not pages.has_adjoints:
            return []
        start = segment.rows_before(block)
        dk, dv = pages.adjoint(start, start + segment.plan[block].mine, run.k.device)
        return [(run.k, dk.to(run.k.dtype)), (run.v, dv.to(run.v.dtype))]

    def pass_adjoint(self, run: AttentionRun, segment: SegmentState, block: int) -> None:
        """Release the block's pages; their adjoints have gone into its graph."""
        pages = segment.layers[self.layer_number].pages
        if not segment.outlives:
            pages.release(segment.rows_before(block))
        elif block == 0:
            pages.close_adjoints()

    def forget(self, segment: SegmentState, block: int) -> None:
        """Drop the block's kept output."""
        segment.layers[self.layer_number].kept.take(block, _device(self.module))

    def select_batch(self, segment: SegmentState, index: torch.Tensor) -> None:
        """Keep the pages of the given members of the batch."""
        segment.layers[self.layer_number].pages.select_batch(index)

    def partial_over_tp(self) -> list[torch.nn.Parameter]:
        """None: Megatron adds the q and k norms itself."""
        return []


def _device(module: PagedCoreAttention) -> torch.device:
    from longstraw.patches.device import current_device

    return current_device()
