"""Multi-latent attention with DeepSeek's sparse selection: latents and index keys in pages, selections shared by layers.

Megatron's AbsorbedMLASelfAttention stays as it is; its core attention is swapped for `PagedSparseAttention`, which gets
absorbed queries, [latent | rotary key] rows, and what the indexer reads. While a block is bound, the rotary tables of the
attention and of its indexer are the block's own (Megatron's start every sequence at 0 and cut it in zigzag).

IndexShare: a layer without an indexer uses the selection of the computing layer before it. That selection lives in a
`SharedSelection` of the block's runs, never on the config. Blocks that end within the first top-k tokens select
everything: they attend densely and score nothing.

Megatron's [s, b, h, d] ends here; inside it is [B, H, S, D].

Left out: training the indexer (it is frozen); YaRN; latent attention without an indexer in the model.
"""

from dataclasses import dataclass

import torch
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttention
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention

from longstraw.adapters.base import EndOfCapture, LayerRun, Root, StatePolicy, prefetch_in_backward, prefetch_pages
from longstraw.attention.geometry import Exchange
from longstraw.attention.latent import attend_latents, latent_attention
from longstraw.attention.layout import BlockLayout
from longstraw.attention.selection import Selection, SelectionGeometry, select
from longstraw.attention.sparse import LatentGeometry
from longstraw.patches.device import current_device
from longstraw.prompt_state.kept import KeptOutputs
from longstraw.prompt_state.ledger import LedgerEntry, foreseen
from longstraw.prompt_state.latents import IndexView, KeptSelections, LatentView
from longstraw.prompt_state.pages import ArenaView, PageArena
from longstraw.segments import SegmentState


@dataclass(eq=False)
class SharedSelection:
    """The selection of one block in a computing layer and the layers after it; None until it is made."""

    selection: Selection | None = None


@dataclass(eq=False)
class LatentState:
    """State of one layer and segment; of a computing layer also index pages, selections, and the last block's own."""

    latents: PageArena
    kept: KeptOutputs
    index: PageArena | None = None
    selections: KeptSelections | None = None
    shared: SharedSelection | None = None


@dataclass(eq=False)
class LatentRun(LayerRun):
    """One block: what core attention reads (above) and leaves (below).

    shared: None where every key is selected. captures: the pass leaves pages. own_latents [B, M, D]: the very tensor of
    the graph. own_index [B, M, E]: index keys of a pass without gradient. output: (o, lse) of such a pass.
    """

    layout: BlockLayout
    stop_here: bool
    latents: tuple[LatentView, ...]
    index: tuple[IndexView, ...]
    shared: SharedSelection | None
    captures: bool
    rows_at_once: int
    exchange: Exchange
    upcoming: tuple[ArenaView, ...] = ()
    preceding: tuple[ArenaView, ...] = ()
    kept: tuple[torch.Tensor, torch.Tensor] | None = None
    own_latents: torch.Tensor | None = None
    own_index: torch.Tensor | None = None
    output: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def history(self) -> tuple[ArenaView, ...]:
        """All pages that the layer will read."""
        return (*self.latents, *self.index)

    @property
    def read_in_forward(self) -> tuple[ArenaView, ...]:
        """The pages that this pass's forward reads: no latents where the output was kept."""
        return self.history if self.kept is None else self.index

    @property
    def differentiated(self) -> tuple[ArenaView, ...]:
        """The pages that the backward reads."""
        return self.latents


class BlockRotary(torch.nn.Module):
    """Stands in for a rotary embedding while a block is bound: the angles of the block's rows, at their positions."""

    def __init__(self, inner: torch.nn.Module, layout: BlockLayout):
        super().__init__()
        self.inner, self.layout = inner, layout

    def get_rotary_seq_len(self, *_, **__) -> int:
        """This rank's rows, padding included."""
        return self.layout.rows

    def forward(self, rows: int, **_) -> torch.Tensor:
        """Angles [rows, 1, 1, rotary dim]."""
        return self.inner.get_emb(rows, offset=self.layout.row_position)


class PagedSparseAttention(DSAttention):
    """Megatron's DSAttention over pages, with the same parameters; runs only while a block is bound to it."""

    def __init__(self, config, *args, **kwargs):
        _refuse_unsupported(config)
        super().__init__(config, *args, **kwargs)
        self._run: LatentRun | None = None
        self._rotaries: list[tuple[torch.nn.Module, torch.nn.Module]] = []
        if self.indexer is not None:
            self.indexer.requires_grad_(False)  # a selection has no gradient

    def follow_blocks(self, attention: AbsorbedMLASelfAttention) -> None:
        """Give the attention that this is the core of, and the indexer, the rotary tables of what is bound."""
        owners = [attention] if self.indexer is None else [attention, self.indexer]
        self._rotaries = [(owner, owner.rotary_pos_emb) for owner in owners]

    @property
    def run(self) -> LatentRun | None:
        """The bound block."""
        return self._run

    @run.setter
    def run(self, run: LatentRun | None) -> None:
        self._run = run
        for owner, rotary in self._rotaries:
            owner.rotary_pos_emb = rotary if run is None else BlockRotary(rotary, run.layout)

    def forward(self, query, key, value, attention_mask, x, qr, up_v_weight=None, **_):
        """query [s, b, H, D], key [s, b, 1, D], x and qr of the indexer, up_v_weight [H, F, V] -> [s, b, H * F]."""
        run = self.run
        q = query.permute(1, 2, 0, 3)
        latents = key[: run.layout.mine, :, 0].transpose(0, 1).contiguous()
        run.own_latents = latents
        scored = self._score(run, x, qr)
        if run.stop_here:
            raise EndOfCapture
        prefetch_pages(run.read_in_forward, run.upcoming)
        if scored is not None:
            run.shared.selection = self._select(run, *scored)
        selection = None if run.shared is None else run.shared.selection
        geometry = LatentGeometry(
            run.layout, self.softmax_scale, self.config.kv_lora_rank, run.rows_at_once, run.latents, exchange=run.exchange
        )
        if torch.is_grad_enabled():
            o = latent_attention(q.contiguous(), latents, selection, geometry, run.kept)
            prefetch_in_backward(o, run.differentiated, run.preceding)
        else:
            run.output = attend_latents(q.contiguous(), latents, selection, geometry)
            o = run.output[0]
        return torch.einsum("bhsv,hfv->sbhf", o, up_v_weight).flatten(2)

    @torch.no_grad()
    def _score(self, run: LatentRun, x, qr) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Index queries [B, I, R, E] and weights [B, I, R], and the own keys left in the run; None where none is wanted.

        A pass that captures leaves the keys for the pages, also where its own block selects everything.
        """
        wanted = run.shared is not None and run.shared.selection is None and not run.stop_here
        if self.indexer is None or not (run.captures or wanted):
            return None
        q, k, weights = self.indexer.forward_before_topk(x.detach(), qr.detach())
        run.own_index = k[: run.layout.mine].transpose(0, 1).contiguous()
        return (q.permute(1, 2, 0, 3), weights.permute(1, 2, 0)) if wanted else None

    def _select(self, run: LatentRun, q: torch.Tensor, weights: torch.Tensor) -> Selection:
        geometry = SelectionGeometry(
            run.layout, self.index_topk, self.config.dsa_indexer_scoring_relu, run.rows_at_once, run.index
        )
        return select(q, weights, run.own_index, geometry)


def _refuse_unsupported(config) -> None:
    """Raise ValueError, naming the flag, for what this attention cannot do."""
    if config.rope_type != "rope":
        raise ValueError(f"--rope-type {config.rope_type} is not supported with latent attention: use --rope-type rope")
    if config.dsa_indexer_loss_coeff:
        raise ValueError(f"--dsa-indexer-loss-coeff {config.dsa_indexer_loss_coeff} is not supported: the indexer is frozen")
    if config.recompute_granularity is not None and set(config.recompute_modules or ()) != {"mlp"}:
        raise ValueError(
            f"--recompute-granularity {config.recompute_granularity} --recompute-modules {config.recompute_modules} would run "
            "latent attention again when its block is no longer bound: only --recompute-modules mlp is supported"
        )


class LatentAttentionAdapter:
    """The sweeps' view of one layer with multi-latent attention."""

    def __init__(self, attention: AbsorbedMLASelfAttention):
        self.key = self.layer_number = attention.layer_number
        core = attention.core_attention
        if type(core) is not PagedSparseAttention:
            raise ValueError(
                f"layer {self.layer_number} has {type(core).__name__} as the core of its latent attention: build the model "
                "with the layer specs of longstraw.patches.layer_specs and sparse_attention=PagedSparseAttention"
            )
        core.follow_blocks(attention)
        self.module, self.source = core, core.source_layer

    @property
    def computes(self) -> bool:
        """Whether this layer computes a selection (others use that of layer `source`)."""
        return self.module.indexer is not None

    def open(self, segment: SegmentState, policy: StatePolicy) -> LatentState:
        """Pages for the tokens that this rank will own."""
        where = dict(
            segment=segment.name, layer_number=self.layer_number, owner=segment.plan[0].rank if segment.plan else 0
        )
        room = dict(
            capacity=segment.rows_before(len(segment.plan)), adjoint_residency=policy.adjoint_residency,
            staging=policy.staging,
        )
        state = LatentState(
            PageArena(**where, **room, residency=policy.page_residency, kind="latent"),
            KeptOutputs(**where, residency=policy.attention_output_residency),
        )
        if self.computes:
            state.index = PageArena(**where, **room, residency=policy.index_page_residency, kind="index")
            state.selections = KeptSelections(**where, residency=policy.selection_residency)
        for owner in (state.latents, state.kept, state.index, state.selections):
            if owner is not None:
                policy.ledger.watch(owner)
        return state

    def foresee(self, segment, policy, dtype, *, stops) -> list[LedgerEntry]:
        """Latents, their adjoints unless the segment is a constant, kept outputs, index keys and kept selections.

        A rank's part of a selection depends on the scores; this takes an equal share of every rank.
        """
        config, tokens, rows = self.module.config, segment.rows_before(len(segment.plan)), segment.padded_rows
        wide, width = torch.promote_types(dtype, torch.float32), config.kv_lora_rank + config.qk_pos_emb_head_dim
        found = [("latent_pages", tokens * width * dtype.itemsize, policy.page_residency)]
        if not segment.constant:
            found.append(("latent_adjoint", tokens * width * wide.itemsize, policy.adjoint_residency))
        if policy.attention_output_residency != "none" and not stops:
            kept = rows * config.num_attention_heads * (config.kv_lora_rank * dtype.itemsize + wide.itemsize)
            found.append(("attention_output", kept, policy.attention_output_residency))
        if self.computes:
            index = tokens * config.dsa_indexer_head_dim * dtype.itemsize
            found.append(("index_pages", index, policy.index_page_residency))
        if self.computes and policy.selection_residency != "none" and not stops:
            scored = sum(b.rows for b in segment.plan if b.start + b.length > self.module.index_topk)
            found.append(("selection", 4 * scored * self.module.index_topk, policy.selection_residency))
        return foreseen(segment, self.layer_number, tokens, found)

    def restore(self, segment, block, policy, *, replay, stop_here) -> LatentRun:
        """The pages before the block and, in a replay, its kept output and selection."""
        layout, state, device = segment.plan[block], segment.layers[self.key], current_device()
        shared = None
        if layout.start + layout.length > self.module.index_topk:
            shared = self._share_selection(segment, block, replay)
        ancestors = [(a, len(a.plan), a.constant) for a in segment.ancestors()] + [(segment, block, False)]
        latents = tuple(LatentView(*self._rows(*of, "latents"), device) for of in ancestors)
        index = ()
        if self.computes and shared is not None and shared.selection is None:
            index = tuple(IndexView(*self._rows(*of, "index"), of[0].own_positions(device)) for of in ancestors)
        return LatentRun(
            layout, stop_here, latents, index, shared, not replay, policy.rows_at_once, policy.attention_exchange,
            kept=state.kept.take(block, device) if replay else None,
        )

    def _rows(self, segment: SegmentState, blocks: int, constant: bool, pages: str):
        rank = segment.plan[0].rank if segment.plan else 0
        return getattr(segment.layers[self.key], pages), segment.rows_of_ranks_before(blocks), rank, constant

    def _share_selection(self, segment: SegmentState, block: int, replay: bool) -> SharedSelection:
        """The block's selection, in common with the layers that use it; with one that was kept, if it was."""
        source = segment.layers[self.source]
        if self.computes:
            source.shared = SharedSelection(source.selections.take(block, current_device()) if replay else None)
        return source.shared

    def capture(self, run: LatentRun, segment: SegmentState, block: int) -> None:
        """Append the block's latents and index keys; keep its output and selection where asked."""
        state = segment.layers[self.key]
        state.latents.append(run.own_latents[:, None])
        if run.output is not None:
            state.kept.keep(block, *run.output)
        if self.computes:
            state.index.append(run.own_index[:, None])
            if run.shared is not None and run.shared.selection is not None:
                state.selections.keep(block, run.shared.selection)
            state.shared = None

    def prepare(self, segment: SegmentState) -> None:
        """Zero adjoints for the latents, on every rank, also where a rank owns none."""
        if segment.plan:
            segment.layers[self.key].latents.open_adjoints(current_device())

    def replay_roots(self, run: LatentRun, segment: SegmentState, block: int) -> list[Root]:
        """The block's latents with the adjoint of their pages, where anything follows the block."""
        pages = segment.layers[self.key].latents
        if not pages.has_adjoints:
            return []
        start = segment.rows_before(block)
        (grad,) = pages.adjoint(start, start + run.layout.mine, run.own_latents.device)
        return [(run.own_latents, grad[:, 0].to(run.own_latents.dtype))]

    def pass_adjoint(self, run: LatentRun, segment: SegmentState, block: int) -> None:
        """Release the block's pages; their adjoints have gone into its graph."""
        state, rows = segment.layers[self.key], segment.rows_before(block)
        state.latents.release(rows)
        if self.computes:
            state.index.release(rows)
            state.shared = None

    def forget(self, segment: SegmentState, block: int) -> None:
        """Drop the block's kept output and selection."""
        state = segment.layers[self.key]
        state.kept.take(block, current_device())
        if self.computes:
            state.selections.take(block, current_device())

    def select_batch(self, segment: SegmentState, index: torch.Tensor) -> None:
        """Keep the pages of the given members of the batch."""
        state = segment.layers[self.key]
        state.latents.select_batch(index)
        if self.computes:
            state.index.select_batch(index)

    def partial_over_tp(self) -> list[torch.nn.Parameter]:
        """None: latent attention runs without tensor parallelism."""
        return []
