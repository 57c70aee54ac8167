"""Gated delta net: a recurrent state and the last conv inputs, sharded by heads over the context-parallel ranks.

Megatron's GatedDeltaNet starts every sequence from nothing and keeps nothing. `StatefulGatedDeltaNet` reuses its
projections, norms and gates, prepends the conv state instead of padding with zeros, starts the delta rule from a given
state and leaves both end states. Token shards become head shards by Megatron's all-to-all, in contiguous order.

B batch, C tokens of the block (all ranks), H value heads of this rank, K key dim, V value dim, X conv channels.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.gated_delta_net.common import (
    _build_head_perm_for_split_sections,
    get_parameter_local_cp,
    tensor_a2a_cp2hp,
    tensor_a2a_hp2cp,
)

from longstraw.adapters.base import EndOfCapture, LayerRun, Root, StatePolicy
from longstraw.attention.delta_rule import chunked_delta_rule, naive_delta_rule
from longstraw.attention.dual import apply_linear, has_tangent
from longstraw.attention.layout import BlockLayout, pad_rows
from longstraw.memory_scopes import memory_scope
from longstraw.patches.device import current_device
from longstraw.prompt_state.ledger import LedgerEntry, foreseen
from longstraw.prompt_state.recurrent import GatedDeltaState, RecurrentStates
from longstraw.prompt_state.residency import Residency
from longstraw.segments import SegmentState

STEPWISE_TOKENS = 4
"""Blocks of at most this many tokens run the delta rule token by token: a chunk's triangular system costs more."""


@dataclass(eq=False)
class GatedDeltaRun(LayerRun):
    """One block: the start state (leaves in a replay; None: the beginning of everything) and the end state it leaves."""

    layout: BlockLayout
    stop_here: bool
    start: GatedDeltaState | None
    end: GatedDeltaState | None = None


class StatefulGatedDeltaNet(GatedDeltaNet):
    """Megatron's GatedDeltaNet from a start state to an end state; runs only while a block is bound to it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.run: GatedDeltaRun | None = None

    def zero_state(self, batch: int, like: torch.Tensor) -> GatedDeltaState:
        """The state before the first token: recurrent [B, H, K, V] and conv [B, X, kernel - 1] of this rank's heads."""
        ways = self.tp_size * self.cp_size
        wide = torch.promote_types(like.dtype, torch.float32)
        recurrent = like.new_zeros(
            batch, self.num_value_heads // ways, self.key_head_dim, self.value_head_dim, dtype=wide
        )
        return GatedDeltaState(recurrent, like.new_zeros(batch, self.conv_dim // ways, self.conv_kernel_dim - 1))

    def forward(self, hidden_states, attention_mask=None, *args, **kwargs):
        """hidden_states [s, b, hidden] of this rank's rows -> (output of the same shape, bias or None)."""
        run, batch = self.run, hidden_states.shape[1]
        start = run.start or self.zero_state(batch, hidden_states)
        x = self._to_head_shards(hidden_states, run.layout)
        qkv, gate, beta, alpha = x.split(self.feat_dim_split, -1)
        gate = gate.reshape(batch, run.layout.length, -1, self.value_head_dim)
        qkv, conv_end = self._convolve(qkv, start.conv)
        core, recurrent_end, gate = self._apply_delta_rule(qkv, gate, beta, alpha, start.recurrent)
        run.end = GatedDeltaState(recurrent_end, conv_end)
        if run.stop_here:
            raise EndOfCapture
        out = self._apply_gated_norm(core, gate).reshape(batch, run.layout.length, -1)
        return self.out_proj(self._to_token_shards(out, run.layout))

    def _to_head_shards(self, hidden_states: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
        """Project, then exchange: [s, b, hidden] of this rank's rows -> [B, C, features of this rank's heads]."""
        x, _ = self.in_proj(hidden_states)
        if self.cp_size > 1:  # sections (q k v z beta alpha) become rank-major, so that one plain all-to-all serves all
            order = _build_head_perm_for_split_sections(self.in_proj_split_sections, self.cp_size, x.device)
            x = x.index_select(-1, order)
            x = apply_linear(
                lambda t: tensor_a2a_cp2hp(t, 0, -1, self.pg_collection.cp, undo_attention_load_balancing=False), x
            )
            x = x.roll(-layout.rotation * layout.rows, 0)
        if len(x) > layout.length:  # slicing costs a copy in the backward
            x = x[: layout.length]
        return x.transpose(0, 1)

    def _to_token_shards(self, out: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
        """The way back: [B, C, features of this rank's heads] -> [s, b, all features] of this rank's rows."""
        out = pad_rows(out.transpose(0, 1), layout.ranks * layout.rows, 0)
        if self.cp_size > 1:
            out = out.roll(layout.rotation * layout.rows, 0)
        return apply_linear(
            lambda t: tensor_a2a_hp2cp(t.contiguous(), 0, -1, self.pg_collection.cp, redo_attention_load_balancing=False),
            out,
        )

    def _convolve(self, qkv: torch.Tensor, conv_state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Causal convolution of [B, C, X] after the conv state [B, X, kernel - 1]; also the state it leaves (a view)."""
        cp, sections = self.pg_collection.cp, [self.qk_dim_local_tp, self.qk_dim_local_tp, self.v_dim_local_tp]
        weight = get_parameter_local_cp(self.conv1d.weight, 0, cp, sections)
        bias = get_parameter_local_cp(self.conv1d.bias, 0, cp, sections) if self.conv_bias else None
        padded = torch.cat([conv_state, qkv.transpose(1, 2)], -1)
        out = self.act_fn(F.conv1d(padded, weight, bias, groups=weight.shape[0])).transpose(1, 2)
        return out, padded[..., padded.shape[-1] - (self.conv_kernel_dim - 1) :]

    def _apply_delta_rule(self, qkv, gate, beta, alpha, recurrent):
        batch, tokens = qkv.shape[:2]
        q, k, v, gate, beta, alpha = self._prepare_input_for_gated_delta_rule(qkv, gate, batch, tokens, beta, alpha)
        cp = self.pg_collection.cp
        a_log, dt_bias = (get_parameter_local_cp(p, 0, cp) for p in (self.A_log, self.dt_bias))
        g, beta = self._compute_g_and_beta(a_log, dt_bias, alpha, beta)
        rule = chunked_delta_rule if has_tangent(q, k, v) else self._pick_delta_rule(tokens)
        core, end = rule(q, k, v, g, beta, recurrent)
        return core, end, gate

    def _pick_delta_rule(self, tokens: int):
        if not self.config.deterministic_mode:
            return _fused_delta_rule
        return naive_delta_rule if tokens <= STEPWISE_TOKENS else chunked_delta_rule


def _fused_delta_rule(q, k, v, g, beta, initial_state):
    """flash-linear-attention's kernel, as Megatron calls it, with both states."""
    from megatron.core.ssm.gated_delta_net.common import chunk_gated_delta_rule

    return chunk_gated_delta_rule(
        q, k, v, g=g, beta=beta, initial_state=initial_state, output_final_state=True, use_qk_l2norm_in_kernel=False
    )


def _residency(segment: SegmentState, policy: StatePolicy) -> Residency:
    """Where a segment's boundaries live: those of what follows a prompt are few, and read at once."""
    return policy.recurrent_state_residency if segment.parent is None else "device"


class GatedDeltaNetAdapter:
    """The sweeps' view of one gated delta net layer."""

    def __init__(self, module: StatefulGatedDeltaNet):
        self.key = self.layer_number = module.layer_number
        self.module = module

    def open(self, segment: SegmentState, policy: StatePolicy) -> RecurrentStates:
        """No boundary yet: the first is the parent's end, or the beginning of everything."""
        rank = self.module.pg_collection.cp.rank()
        states = RecurrentStates(
            segment=segment.name, layer_number=self.layer_number, owner=rank, residency=_residency(segment, policy),
            device=current_device(),
        )
        policy.ledger.watch(states)
        return states

    def foresee(self, segment, policy, dtype, *, stops) -> list[LedgerEntry]:
        """A recurrent and a conv state after each block, and the adjoint of one, unless the segment is a constant."""
        state = self.module.zero_state(1, torch.empty(0, dtype=dtype, device="meta"))
        recurrent, conv, blocks = state.recurrent.nbytes, state.conv.nbytes, len(segment.plan)
        where = _residency(segment, policy)
        found = [("recurrent_state", blocks * recurrent, where), ("conv_state", blocks * conv, where)]
        if not segment.constant:
            wide = torch.promote_types(dtype, torch.float32)
            numbers = state.recurrent.numel() + state.conv.numel()
            found.append(("gdn_adjoint", numbers * wide.itemsize, "device"))
        return foreseen(segment, self.layer_number, 0, found)

    def _start_of(self, segment: SegmentState, block: int) -> GatedDeltaState | None:
        """The state at a block's start, for the segment's batch; None at the beginning of everything."""
        if block:
            return segment.layers[self.layer_number].at(block)
        parent = segment.parent
        while parent is not None and not parent.plan:  # an empty segment leaves its parent's state
            parent = parent.parent
        if parent is None:
            return None
        return parent.layers[self.layer_number].at(len(parent.plan)).expand_batch(segment.batch)

    def restore(self, segment, block, policy, *, replay, stop_here, live=False) -> GatedDeltaRun:
        """The boundary state, as leaves that take gradients in a replay."""
        start = self._start_of(segment, block)
        if replay and start is not None:
            start = start.map(lambda t: t.detach().clone().requires_grad_())
        return GatedDeltaRun(segment.plan[block], stop_here, start)

    def capture(self, run: GatedDeltaRun, segment: SegmentState, block: int) -> None:
        """Keep the block's end as the next boundary."""
        segment.layers[self.layer_number].keep(block + 1, run.end)

    def prepare(self, segment: SegmentState) -> None:
        """Nothing: every following segment adds an adjoint of the end state."""

    def replay_roots(self, run: GatedDeltaRun, segment: SegmentState, block: int) -> list[Root]:
        """The end states with their adjoint, where anything follows the block."""
        adjoint = segment.layers[self.layer_number].adjoint
        if adjoint is None:
            return []
        return [
            (run.end.recurrent, adjoint.recurrent.to(run.end.recurrent.dtype)),
            (run.end.conv, adjoint.conv.to(run.end.conv.dtype)),
        ]

    def pass_adjoint(self, run: GatedDeltaRun, segment: SegmentState, block: int) -> None:
        """The leaves' gradients become the adjoint of the boundary before; at a segment's start, its parent's."""
        states = segment.layers[self.layer_number]
        if not (segment.outlives and block + 1 == len(segment.plan)):
            states.release(block + 1)
        states.adjoint = None
        if run.start is None:
            return
        # Both gradients are views of the whole block's buffers, which would live on with them.
        with memory_scope("adjoints"):
            adjoint = run.start.map(lambda leaf: leaf.grad.clone())
        if block:
            states.adjoint = adjoint
            return
        parent = segment.parent
        while not parent.plan:
            parent = parent.parent
        if not parent.constant:
            parent.layers[self.layer_number].add_adjoint(adjoint)

    def forget(self, segment: SegmentState, block: int) -> None:
        """Drop the boundary before the block."""
        segment.layers[self.layer_number].release(block)

    def select_batch(self, segment: SegmentState, index: torch.Tensor) -> None:
        """Keep the states of the given members of the batch."""
        segment.layers[self.layer_number].select_batch(index)

    def partial_over_tp(self) -> list[torch.nn.Parameter]:
        """The output norm, without sequence parallelism: each TP rank sees its own heads only."""
        return [] if self.module.config.sequence_parallel else list(self.module.out_norm.parameters())
