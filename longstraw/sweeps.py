"""The one algorithm: a forward sweep that leaves boundary states, and a reverse sweep that differentiates block by block.

`forward_sweep` runs a segment's blocks without autograd and leaves its state. `reverse_sweep` recomputes them last to
first, each with its own small graph: the roots of its one backward are the block's loss, its keys and values with their
pages' adjoints, and its end states with theirs. Of a prompt's last `live_chunks` blocks the forward sweep keeps that
graph. `replay` does both over a tree of segments: the loss's exact gradient lands in the parameters, and nothing but the
segment states outlives a block.

Every rank builds the same graph, with the same roots in the same order, whatever it owns: otherwise the collectives in
the backward would not match.

Left out: rewards, old log-probabilities, the optimizer (see `longstraw.transaction`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from longstraw.adapters.base import Key, LayerRun, StatePolicy, bind
from longstraw.adapters.decoder import run_decoder, token_logprobs
from longstraw.adapters.lockstep import Lockstep, PassKind
from longstraw.adapters.registry import find_adapters, find_routers
from longstraw.attention.exchange import gather_tokens
from longstraw.attention.layout import plan_blocks
from longstraw.patches.device import current_device
from longstraw.prompt_state.ledger import Ledger, LedgerEntry
from longstraw.prompt_state.residency import Staging
from longstraw.segments import BlockLoss, Segment, SegmentState, cut_columns, own_columns, prompt_segment
from longstraw.sweep_config import SweepConfig


class ReplayEngine:
    """Sweeps over one model: the adapters of its layers, its state policy and its ledger.

    model: a GPTModel with stateful layers (unwrapped), whose `pg_collection` names the groups. vocab_size: the true
    vocabulary; rows of the projection beyond it are padding. temperature: of every log-probability.
    """

    def __init__(self, model, config: SweepConfig, *, vocab_size: int, temperature: float = 1.0):
        self.model, self.config, self.vocab_size, self.temperature = model, config, vocab_size, temperature
        self.cp = model.pg_collection.cp
        self.unit = model.pg_collection.tp.size() if model.config.sequence_parallel else 1
        self.mixers = find_adapters(model, model.config.num_layers)
        self.routers = find_routers(model)
        self.adapters = [*self.mixers, *self.routers]
        self.lockstep = Lockstep(model.pg_collection.ep, self.cp, current_device())
        if config.live_chunks and self.lockstep.group is not None:
            raise ValueError(
                f"--live-chunks {config.live_chunks}: replicas that share experts (--expert-model-parallel-size above "
                "--context-parallel-size) run in step, backward by backward, and none can keep a graph for later"
            )
        self.ledger = Ledger()
        self.phase: Callable[[str], AbstractContextManager] = nullcontext
        """Told of what runs: `capture` (a prompt forward), `score` (responses forward), `responses` (their scores and replay) and
        `prompt_reverse`."""
        self.auxiliary_loss = 0.0
        """This rank's share of the losses that layers added in replays so far (the indexer's); the caller sets it back."""
        self.policy = StatePolicy(
            page_residency=config.page_residency, recurrent_state_residency=config.recurrent_state_residency,
            index_page_residency=config.index_page_residency,
            adjoint_residency=config.adjoint_residency, selection_residency=config.selection_residency,
            attention_output_residency=config.attention_output_residency, rows_at_once=config.query_rows_at_once,
            attention_exchange=config.attention_exchange, staging=Staging(current_device()), ledger=self.ledger,
        )

    def open_segment(
        self, segment: Segment, parent: SegmentState | None, *, constant: bool = False, for_replay: bool = False
    ) -> SegmentState:
        """The empty state of a segment that follows `parent` (None: the beginning)."""
        start = 0 if parent is None else parent.end
        block_size = self.config.prompt_chunk_size if segment.captures_only else self.config.response_block_size
        block_size = segment.block_size or block_size
        plan = plan_blocks(start, segment.length, block_size, self.cp.size(), self.cp.rank(), self.unit, self.cp)
        state = SegmentState(
            segment.name, parent, plan, segment.inputs.shape[0], start, constant=constant,
            predicts=segment.targets is not None, row_weights=segment.row_weights, routes=segment.routes,
            live={} if for_replay and segment.captures_only and not constant else None,
        )
        for adapter in self.adapters:
            state.layers[adapter.key] = adapter.open(state, self.policy)
        return state

    def _run_block(self, segment: Segment, state: SegmentState, block: int, *, replay: bool, live: bool = False):
        """One block through the model, once it is its turn -> (hidden or None, adapter's key -> run).

        live: of a replay, that it leaves its state as a forward does.
        """
        self._serve_until(PassKind(replay, segment.captures_only))
        return self._pass_block(segment, state, block, replay=replay, live=live)

    def _pass_block(self, segment: Segment, state: SegmentState, block: int, *, replay: bool, live: bool = False):
        stop_at = self.mixers[-1] if segment.captures_only else None
        runs: dict[Key, LayerRun] = {}
        for adapter in self.adapters:
            stop_here = adapter is stop_at
            runs[adapter.key] = adapter.restore(state, block, self.policy, replay=replay, stop_here=stop_here, live=live)
        self._announce_pages(runs)
        with bind(self.adapters, runs):
            hidden = run_decoder(self.model, segment.inputs[:, cut_columns(state, block)], state.plan[block])
        return hidden, runs

    def foresee_state(self, tokens: int) -> list[LedgerEntry]:
        """What the state of a prompt of that many tokens will hold on this rank at its fullest; nothing is allocated.

        As if no chunk kept its graph: captures that no replay follows (of several prompts a step, of a reference) keep none.
        """
        prompt = prompt_segment(torch.empty(1, tokens, dtype=torch.long, device="meta"))
        segment = self.open_segment(prompt, None, constant=self.config.semantics == "response_only")
        dtype = next(self.model.parameters()).dtype
        return [
            entry
            for adapter in self.adapters
            for entry in adapter.foresee(
                segment, self.policy, dtype, stops=adapter.layer_number == self.mixers[-1].layer_number
            )
        ]

    def finish_phase(self) -> None:
        """Serve the passes of replicas that share this one's experts until none wants any more.

        Collective over those replicas; called before anything else that is collective over data parallelism.
        """
        self._serve_until(None)

    def _serve_until(self, wanted: PassKind | None) -> None:
        while (kind := self.lockstep.choose(wanted)) != wanted:
            with torch.set_grad_enabled(kind.replay):
                self._serve_experts(kind)

    def _serve_experts(self, kind: PassKind) -> None:
        """A pass of one token that follows nothing and has no weight in any loss: it adds zeros to every gradient."""
        token = torch.zeros(1, 1, dtype=torch.long, device=current_device())
        segment = Segment("idle", token, captures_only=kind.captures_only)
        if not kind.captures_only:
            segment.targets, segment.loss = token, lambda logprobs, columns: 0.0 * logprobs.sum()
            segment.row_weights = torch.zeros(1, 1)
        state = self.open_segment(segment, None)
        hidden, runs = self._pass_block(segment, state, 0, replay=kind.replay)
        if kind.replay:
            for adapter in self.adapters:
                adapter.capture(runs[adapter.key], state, 0)
                adapter.prepare(state)
            logprobs = None if segment.loss is None else self._logprobs(segment, state, 0, hidden)
            self._differentiate_block(segment, state, 0, runs, logprobs)

    def _announce_pages(self, runs: dict[Key, LayerRun]) -> None:
        """Tell each paged layer which pages the next one will read, in the forward and in the backward, so that they are
        fetched meanwhile."""
        paged = [run for run in runs.values() if getattr(run, "history", None)]
        for run, following in zip(paged, paged[1:]):
            run.upcoming, following.preceding = following.read_in_forward, run.differentiated

    def _logprobs(self, segment: Segment, state: SegmentState, block: int, hidden: torch.Tensor) -> torch.Tensor:
        return token_logprobs(
            self.model, hidden, segment.targets[:, cut_columns(state, block)], state.plan[block],
            temperature=self.temperature, chunk_tokens=self.config.logprob_chunk_tokens, vocab_size=self.vocab_size,
        )

    @torch.no_grad()
    def run_forward(self, segment: Segment, state: SegmentState, block: int) -> torch.Tensor | None:
        """One block of the forward sweep: captures its state and returns its hidden states [rows, B, hidden]."""
        hidden, runs = self._run_forward(segment, state, block)
        for adapter in self.adapters:
            adapter.capture(runs[adapter.key], state, block)
        return hidden

    def _run_forward(self, segment: Segment, state: SegmentState, block: int):
        """A block of the forward sweep -> (hidden, adapter's key -> run); the last ones of a prompt may keep their graph."""
        if not self.keeps_graph(state, block):
            return self._run_block(segment, state, block, replay=False)
        with torch.enable_grad():
            state.live[block] = self._run_block(segment, state, block, replay=True, live=True)
        return state.live[block]

    def keeps_graph(self, state: SegmentState, block: int) -> bool:
        """Whether the forward sweep keeps a block's graph for the reverse sweep."""
        return state.live is not None and block >= len(state.plan) - self.config.live_chunks

    @torch.no_grad()
    def forward_sweep(
        self, segment: Segment, parent: SegmentState | None, *, constant: bool = False, for_replay: bool = False
    ) -> tuple[SegmentState, torch.Tensor | None]:
        """Run a segment without autograd.

        for_replay: a reverse sweep follows under the same weights, for which a prompt's last blocks may keep their graphs.
        Returns its state, and the log-probabilities of its targets [B, S], equal on every rank (None without targets).
        """
        state = self.open_segment(segment, parent, constant=constant, for_replay=for_replay)
        with self.phase("capture" if segment.captures_only else "score"):
            logprobs = self._run_blocks(segment, state, len(state.plan))
        return state, torch.cat(logprobs, 1) if logprobs else None

    @torch.no_grad()
    def _run_blocks(self, segment: Segment, state: SegmentState, blocks: int) -> list[torch.Tensor]:
        """The forward sweep over the first `blocks` blocks; the log-probabilities of each, where there are targets."""
        logprobs = []
        for block in range(blocks):
            hidden = self.run_forward(segment, state, block)
            if segment.targets is not None:
                own = self._logprobs(segment, state, block, hidden)
                logprobs.append(gather_tokens(own, state.plan[block]))
        return logprobs

    def capture_boundaries(self, segment: Segment, parent: SegmentState | None, *, constant: bool) -> SegmentState:
        """The state that the reverse sweep needs: every block's start and, where children follow, the segment's end."""
        state = self.open_segment(segment, parent, constant=constant, for_replay=bool(segment.children))
        for block in range(len(state.plan) if segment.children else len(state.plan) - 1):
            self.run_forward(segment, state, block)
        return state

    def forget_block(self, state: SegmentState, block: int) -> None:
        """Drop what only a reverse sweep would need of a block that has run."""
        for adapter in self.adapters:
            adapter.forget(state, block)

    def prepare_adjoints(self, state: SegmentState) -> None:
        """Open zero adjoints of a segment's state, before anything that follows it is differentiated."""
        for adapter in self.adapters:
            adapter.prepare(state)

    def reverse_sweep(self, segment: Segment, state: SegmentState) -> float:
        """Differentiate a segment's blocks, last to first, given the adjoints of its state; returns its loss.

        Gradients land in the parameters; the adjoint of its start goes to its parent's state. The state is used up.
        The loss is this rank's share.
        """
        with self.phase("prompt_reverse" if segment.captures_only else "responses"):
            if len(state.plan) > 1:
                self.prepare_adjoints(state)
            return self._reverse_blocks(segment, state, len(state.plan), 0.0)

    def score_and_replay(
        self, segment: Segment, parent: SegmentState | None, make_loss: Callable[[torch.Tensor], BlockLoss]
    ) -> float:
        """Forward sweep and reverse sweep of a segment without children, where its loss needs its own log-probabilities.

        make_loss: gets them, [B, S] without gradient and equal on every rank, and returns the loss of a block. The last
        block is run once, not twice: its graph is kept while the loss is made. Returns this rank's share of the loss.
        Raises ValueError for a segment with children, whose adjoints would come too late.
        """
        if segment.children:
            raise ValueError(f"segment {segment.name} has children: run its forward and reverse sweep around theirs")
        with self.phase("responses"):
            state = self.open_segment(segment, parent)
            last = len(state.plan) - 1
            logprobs = self._run_blocks(segment, state, last)
            if last:
                self.prepare_adjoints(state)
            hidden, runs = self._run_block(segment, state, last, replay=True)
            own = self._logprobs(segment, state, last, hidden)
            logprobs.append(gather_tokens(own, state.plan[last]))
            segment.loss = make_loss(torch.cat(logprobs, 1))
            total = self._differentiate_block(segment, state, last, runs, own)
            del hidden, runs, own
            return self._reverse_blocks(segment, state, last, total)

    def _reverse_blocks(self, segment: Segment, state: SegmentState, blocks: int, total: float) -> float:
        """The reverse sweep over the first `blocks` blocks; returns `total` plus their losses."""
        for block in reversed(range(blocks)):
            total += self._reverse_block(segment, state, block)
        return total

    def _reverse_block(self, segment: Segment, state: SegmentState, block: int) -> float:
        kept = None if state.live is None else state.live.pop(block, None)
        hidden, runs = self._run_block(segment, state, block, replay=True) if kept is None else kept
        logprobs = None if segment.loss is None else self._logprobs(segment, state, block, hidden)
        return self._differentiate_block(segment, state, block, runs, logprobs)

    def _differentiate_block(
        self, segment: Segment, state: SegmentState, block: int, runs: dict[Key, LayerRun], logprobs: torch.Tensor | None
    ) -> float:
        """The one backward of a block whose graph is there; its adjoints go on to what came before."""
        tensors, grads, loss = [], [], None
        if logprobs is not None:
            loss = segment.loss(logprobs, own_columns(state, block))
            tensors.append(loss)
            grads.append(torch.ones_like(loss))
        for adapter in self.adapters:
            for tensor, grad in adapter.replay_roots(runs[adapter.key], state, block):
                tensors.append(tensor)
                grads.append(grad)
        torch.autograd.backward(tensors, grads)
        for adapter in self.adapters:
            adapter.pass_adjoint(runs[adapter.key], state, block)
        self.auxiliary_loss += sum(r.auxiliary_loss.item() for r in runs.values() if r.auxiliary_loss is not None)
        return 0.0 if loss is None else loss.item()

    def replay_children(self, children: list[Segment], state: SegmentState) -> float:
        """Replay the segments that follow `state`, whose adjoints accumulate; returns this rank's share of the loss."""
        if not state.constant:
            self.prepare_adjoints(state)
        return sum(self.replay(child, state) for child in children)

    def replay(self, segment: Segment, parent: SegmentState | None = None) -> float:
        """Forward sweep, children, reverse sweep: the whole gradient of a tree; returns this rank's share of the loss.

        Under `response_only` the root (a prompt, without loss) is a constant, and its reverse sweep is skipped.
        """
        constant = self.config.semantics == "response_only" and parent is None and segment.loss is None
        state = self.capture_boundaries(segment, parent, constant=constant)
        loss = self.replay_children(segment.children, state) if segment.children else 0.0
        return loss if constant else loss + self.reverse_sweep(segment, state)
