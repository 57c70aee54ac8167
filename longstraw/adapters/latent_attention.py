"""Multi-latent attention with DeepSeek's sparse selection: latents and index keys in pages, selections shared by layers.

Megatron's AbsorbedMLASelfAttention stays as it is; its core attention is swapped for `PagedSparseAttention`, which gets
absorbed queries, [latent | rotary key] rows, and what the indexer reads. While a block is bound, the rotary tables of the
attention and of its indexer are the block's own (Megatron's start every sequence at 0 and cut it in zigzag).

IndexShare: a layer without an indexer uses the selection of the computing layer before it. That selection lives in a
`SharedSelection` of the block's runs, never on the config. Blocks that end within the first top-k tokens select
everything: they attend densely and score nothing.

Training the indexer: with --dsa-indexer-loss-coeff c above 0 the loss has a further term (`longstraw.attention.indexer_loss`)

    c x sum over computing layers and rows t of w_t x KL(p_t || q_t)

where p is that layer's own attention over the selected keys, as in Megatron: layers that share its selection add nothing.
w_t is the weight of row t in the main loss: the rows that predict a trained response token, with the main loss's
normaliser. Rows of a prompt have no weight; their index keys get the gradient that response rows give them, through
adjoints of index pages. Inputs of the indexer are cut from the graph: this term trains the indexer's parameters and
nothing else, and nothing else trains these. Without it the indexer is frozen.

Megatron's [s, b, h, d] ends here; inside it is [B, H, S, D].

Left out: the indexer's loss over all keys; YaRN; latent attention without an indexer in the model.
"""

from dataclasses import dataclass

import torch
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttention
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention

from longstraw.adapters.base import EndOfCapture, LayerRun, Root, StatePolicy, prefetch_in_backward, prefetch_pages
from longstraw.attention.geometry import Exchange
from longstraw.attention.indexer_loss import IndexerGradients, IndexerLossGeometry, MainAttention, differentiate_indexer
from longstraw.attention.latent import attend_latents, latent_attention
from longstraw.attention.layout import BlockLayout
from longstraw.attention.selection import Selection, SelectionGeometry, select, select_everything
from longstraw.attention.sparse import LatentGeometry
from longstraw.patches.device import current_device
from longstraw.prompt_state.kept import KeptOutputs
from longstraw.prompt_state.ledger import LedgerEntry, foreseen
from longstraw.prompt_state.latents import IndexView, KeptSelections, LatentView
from longstraw.prompt_state.pages import ArenaView, PageArena
from longstraw.segments import SegmentState, cut_columns


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

    shared: None where every key is selected. captures: the pass leaves pages. trains: its backward reaches the indexer;
    predicts: and the segment has targets. row_weights [B, R]: of the indexer's loss; None where the block has none.
    own_latents [B, M, D] and own_index [B, M, E]: the very tensors of the graph. index_queries: q [B, I, R, E] and head
    weights [B, I, R] for the selection and, where it predicts, of the graph. index_grads: of these and own_index, once the
    loss is taken. output: (o, lse) of a pass without gradient.
    """

    layout: BlockLayout
    stop_here: bool
    latents: tuple[LatentView, ...]
    index: tuple[IndexView, ...]
    shared: SharedSelection | None
    captures: bool
    rows_at_once: int
    exchange: Exchange
    trains: bool = False
    predicts: bool = False
    row_weights: torch.Tensor | None = None
    upcoming: tuple[ArenaView, ...] = ()
    preceding: tuple[ArenaView, ...] = ()
    kept: tuple[torch.Tensor, torch.Tensor] | None = None
    own_latents: torch.Tensor | None = None
    own_index: torch.Tensor | None = None
    index_queries: tuple[torch.Tensor, torch.Tensor] | None = None
    index_grads: IndexerGradients | None = None
    output: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def history(self) -> tuple[ArenaView, ...]:
        """All pages that the layer will read."""
        return (*self.latents, *self.index)

    @property
    def read_in_forward(self) -> tuple[ArenaView, ...]:
        """The pages that this pass's forward reads: no latents where the output was kept and the indexer learns nothing."""
        return self.history if self.kept is None or self.row_weights is not None else self.index

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
        if self.indexer is not None and not config.dsa_indexer_loss_coeff:
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
        self._score(run, x, qr)
        if run.stop_here:
            raise EndOfCapture
        prefetch_pages(run.read_in_forward, run.upcoming)
        if run.shared is not None and run.shared.selection is None:
            run.shared.selection = self._select(run)
        selection = None if run.shared is None else run.shared.selection
        geometry = LatentGeometry(
            run.layout, self.softmax_scale, self.config.kv_lora_rank, run.rows_at_once, run.latents, exchange=run.exchange
        )
        if torch.is_grad_enabled():
            kept = run.kept
            if run.row_weights is not None:
                kept = self._learn(run, q.detach().contiguous(), latents.detach(), selection, geometry)
            o = latent_attention(q.contiguous(), latents, selection, geometry, kept)
            prefetch_in_backward(o, run.differentiated, run.preceding)
        else:
            run.output = attend_latents(q.contiguous(), latents, selection, geometry)
            o = run.output[0]
        return torch.einsum("bhsv,hfv->sbhf", o, up_v_weight).flatten(2)

    def _score(self, run: LatentRun, x, qr) -> None:
        """Leave in the run the own index keys, for the pages or as roots, and the index queries, where any are wanted.

        A pass that captures leaves the keys, also where its own block selects everything.
        """
        selects = run.shared is not None and run.shared.selection is None and not run.stop_here
        if self.indexer is None or not (run.captures or run.trains or selects):
            return
        with torch.set_grad_enabled(run.trains):
            q, k, weights = self.indexer.forward_before_topk(x.detach(), qr.detach())
            run.own_index = k[: run.layout.mine].transpose(0, 1).contiguous()
            if selects or run.predicts:
                run.index_queries = q.permute(1, 2, 0, 3), weights.permute(1, 2, 0)

    def _select(self, run: LatentRun) -> Selection:
        geometry = SelectionGeometry(
            run.layout, self.index_topk, self.config.dsa_indexer_scoring_relu, run.rows_at_once, run.index
        )
        selection = select(*run.index_queries, run.own_index, geometry)
        if not run.predicts:
            run.index_queries = None
        return selection

    @torch.no_grad()
    def _learn(self, run: LatentRun, q, latents, selection, geometry: LatentGeometry) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the indexer's loss of the block; returns the attention's output and log-sum-exp, which it needs anyway."""
        kept = run.kept or attend_latents(q, latents, selection, geometry)
        if selection is None:
            selection = select_everything(run.layout, run.rows_at_once, run.index, q.shape[0], q.device)
        run.index_grads = differentiate_indexer(
            *run.index_queries, run.own_index, MainAttention(q, latents, kept[1]), run.row_weights, selection,
            IndexerLossGeometry(
                run.layout, self.softmax_scale, self.config.dsa_indexer_scoring_relu, run.rows_at_once, run.latents, run.index
            ),
        )
        run.auxiliary_loss = run.index_grads.loss
        return kept


def _refuse_unsupported(config) -> None:
    """Raise ValueError, naming the flag, for what this attention cannot do."""
    if config.rope_type != "rope":
        raise ValueError(f"--rope-type {config.rope_type} is not supported with latent attention: use --rope-type rope")
    if config.dsa_indexer_loss_coeff and not config.dsa_indexer_use_sparse_loss:
        raise ValueError(
            f"--dsa-indexer-loss-coeff {config.dsa_indexer_loss_coeff} needs --dsa-indexer-use-sparse-loss: the indexer's loss "
            "over all keys is not supported, only over the selected ones"
        )
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

    @property
    def trains(self) -> bool:
        """Whether the layer has an indexer with anything to train."""
        return self.computes and any(parameter.requires_grad for parameter in self.module.indexer.parameters())

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
        if self.trains and not segment.constant:
            adjoint = tokens * config.dsa_indexer_head_dim * wide.itemsize
            found.append(("index_adjoint", adjoint, policy.adjoint_residency))
        if self.computes and policy.selection_residency != "none" and not stops:
            scored = sum(b.rows for b in segment.plan if b.start + b.length > self.module.index_topk)
            found.append(("selection", 4 * scored * self.module.index_topk, policy.selection_residency))
        return foreseen(segment, self.layer_number, tokens, found)

    def restore(self, segment, block, policy, *, replay, stop_here, live=False) -> LatentRun:
        """The pages before the block and, in a replay, its kept output and selection, and the rows that teach the indexer.

        Raises ValueError where the indexer has a loss but a segment with targets no row weights.
        """
        layout, state, device = segment.plan[block], segment.layers[self.key], current_device()
        shared = None
        if layout.start + layout.length > self.module.index_topk:
            shared = self._share_selection(segment, block, replay)
        ancestors = [(a, len(a.plan), a.constant) for a in segment.ancestors()] + [(segment, block, False)]
        latents = tuple(LatentView(*self._rows(*of, "latents"), device) for of in ancestors)
        trains, index = replay and self.trains, ()
        row_weights = self._row_weights(segment, block) if trains and segment.predicts else None
        if self.computes and (row_weights is not None or shared is not None and shared.selection is None):
            index = tuple(IndexView(*self._rows(*of, "index"), device, of[0].own_positions(device)) for of in ancestors)
        return LatentRun(
            layout, stop_here, latents, index, shared, live or not replay, policy.rows_at_once, policy.attention_exchange,
            trains=trains, predicts=trains and segment.predicts, row_weights=row_weights,
            kept=state.kept.take(block, device) if replay else None,
        )

    def _row_weights(self, segment: SegmentState, block: int) -> torch.Tensor | None:
        """What this rank's rows [B, R] weigh in the indexer's loss; None, on every rank alike, where none weighs anything."""
        coefficient = self.module.config.dsa_indexer_loss_coeff
        if not coefficient:
            return None
        if segment.row_weights is None:
            raise ValueError(f"--dsa-indexer-loss-coeff {coefficient} needs row weights in segment {segment.name}")
        weights = segment.row_weights[:, cut_columns(segment, block)]
        return segment.plan[block].take_rows(coefficient * weights).to(current_device()) if weights.any() else None

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
            if run.own_index is not None:  # a replay that stands in for a capture leaves keys only if they have a gradient
                state.index.append(run.own_index[:, None])
            if run.output is not None and run.shared is not None and run.shared.selection is not None:  # for a replay
                state.selections.keep(block, run.shared.selection)
            state.shared = None

    def prepare(self, segment: SegmentState) -> None:
        """Zero adjoints for the latents (and index keys), on every rank, also where a rank owns none."""
        if segment.plan:
            segment.layers[self.key].latents.open_adjoints(current_device())
            if self.trains:
                segment.layers[self.key].index.open_adjoints(current_device())

    def replay_roots(self, run: LatentRun, segment: SegmentState, block: int) -> list[Root]:
        """The block's latents with the adjoint of their pages, where anything follows the block; and the indexer's."""
        roots, pages = [], segment.layers[self.key].latents
        start = segment.rows_before(block)
        if pages.has_adjoints:
            (grad,) = pages.adjoint(start, start + run.layout.mine, run.own_latents.device)
            roots.append((run.own_latents, grad[:, 0].to(run.own_latents.dtype)))
        return roots + self._index_roots(run, segment, start) if run.trains else roots

    def _index_roots(self, run: LatentRun, segment: SegmentState, start: int) -> list[Root]:
        """Own index keys with what their own block and later ones give them, and the queries of a segment with targets.

        Zeros where there is nothing: a parameter that could be trained has a gradient.
        """
        pages, grads, keys = segment.layers[self.key].index, run.index_grads, run.own_index
        grad = torch.zeros_like(keys, dtype=torch.promote_types(keys.dtype, torch.float32)) if grads is None else grads.k
        if pages.has_adjoints:
            grad = grad + pages.adjoint(start, start + run.layout.mine, keys.device)[0][:, 0]
        roots = [(keys, grad.to(keys.dtype))]
        if run.predicts:
            found = map(torch.zeros_like, run.index_queries) if grads is None else (grads.q, grads.weights)
            roots += [(tensor, grad.to(tensor.dtype)) for tensor, grad in zip(run.index_queries, found)]
        return roots

    def pass_adjoint(self, run: LatentRun, segment: SegmentState, block: int) -> None:
        """Release the block's pages; their adjoints have gone into its graph."""
        state, rows = segment.layers[self.key], segment.rows_before(block)
        for pages in (state.latents, *([state.index] if self.computes else [])):
            if not segment.outlives:
                pages.release(rows)
            elif block == 0:
                pages.close_adjoints()
        if self.computes:
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
