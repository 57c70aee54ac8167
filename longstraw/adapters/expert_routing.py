"""Mixture of experts: the router's choices, recorded in the forward sweep and repeated in the reverse sweep.

A segment may prescribe the choices of its first pass too: those of whoever sampled it.

Experts have no state between tokens; what has to be kept is which experts each token went to. The gates are not kept:
they are computed anew from the recorded choice, so the router gets its gradient. Megatron's router asks an object of
its instance for the choice (`router_replay`); a run stands in for that object while its block is bound, and no longer.
Megatron's own RouterReplay is not used: it registers every router of the process in one list of its class.

Padding rows go to no expert, so they move no bytes and count nowhere; a rank that owns no token still takes part in the
exchange. The bias of the experts is frozen: it moves outside the gradient, and a step that rolls back must leave it.

T tokens that this rank owns (over the whole batch), E experts, K experts a token.
"""

from dataclasses import dataclass, replace

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from longstraw.adapters.base import LayerRun, Root, StatePolicy
from longstraw.attention.layout import BlockLayout
from longstraw.patches.device import current_device
from longstraw.prompt_state.ledger import LedgerEntry, foreseen
from longstraw.prompt_state.routing import RoutingRecord
from longstraw.segments import SegmentState, own_columns


@dataclass(eq=False)
class RoutingRun(LayerRun):
    """One block: the recorded experts [T, K] (None: the block has not run before) and those that this pass used."""

    layout: BlockLayout
    stop_here: bool
    recorded: torch.Tensor | None
    used: torch.Tensor | None = None
    batch: int = 1

    @property
    def tokens(self) -> int:
        """T: rows of the router that are no padding; they come first."""
        return self.layout.mine * self.batch

    def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        """Megatron's question: scores [rows, E] -> (scores of the chosen [rows, K], the chosen [rows, K]).

        The scores of recorded experts are taken live, with gradient. The chosen come in the order of their numbers (top-k
        sorts only where there is a gradient), so that sums over them are the same to the bit in every pass.
        """
        if self.recorded is None:
            chosen = default_compute_topk(scores, topk, num_groups, group_topk)[1].sort(1).values
        else:
            padding = torch.arange(topk, device=scores.device).expand(scores.shape[0] - self.tokens, topk)
            chosen = torch.cat([self.recorded, padding])
        self.used = chosen[: self.tokens]
        return scores.gather(1, chosen), chosen


class ReplayRouter(TopKRouter):
    """Megatron's TopKRouter by record; runs only while a block is bound to it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.run: RoutingRun | None = None
        self.frozen_expert_bias = True

    def _apply(self, fn, recurse: bool = True):
        """As torch's; the biases keep float32 where the weights get narrower: experts would change places."""
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None:
            self.expert_bias = bias.to(self.expert_bias.device)
        return self

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None):
        """logits [s, b, E] of this rank's rows -> (gates [s * b, E], whether a token goes to an expert [s * b, E])."""
        self.run.batch = logits.shape[1]
        self.router_replay = self.run
        try:
            gates, routing_map = super().routing(logits)
        finally:
            self.router_replay = None
        if self.run.tokens < routing_map.shape[0]:
            real = torch.arange(routing_map.shape[0], device=routing_map.device) < self.run.tokens
            routing_map = routing_map & real[:, None]
        return gates, routing_map

    def _apply_expert_bias(self, routing_map, padding_mask=None):
        """Nothing: a frozen bias needs no counts, and a replay would count a token twice."""


class RealTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all between tokens and experts, which would take every row for a token of K experts."""

    router: ReplayRouter

    def preprocess(self, routing_map: torch.Tensor) -> torch.Tensor:
        """As Megatron's, with the number of rows that go to experts."""
        tokens_per_expert = super().preprocess(routing_map)
        self.num_out_tokens = self.router.run.tokens * self.config.moe_router_topk
        return tokens_per_expert

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """As Megatron's, which keeps the gates until the next pass: through their graph they would keep every page."""
        output = super().combine_postprocess(hidden_states)
        self.probs = None
        return output


class ReplayMoELayer(MoELayer):
    """Megatron's MoELayer whose router repeats its choices and whose dispatcher leaves padding behind."""

    def __init__(self, config, submodules: MoESubmodules, *args, **kwargs):
        _refuse_other_rules(config)
        super().__init__(config, replace(submodules, router=ReplayRouter), *args, **kwargs)
        self.token_dispatcher = RealTokenDispatcher(
            self.num_local_experts, self.local_expert_indices, config=self.config,
            pg_collection=kwargs["pg_collection"],
        )
        self.token_dispatcher.router = self.router


def _refuse_other_rules(config) -> None:
    """Raise ValueError, naming the flag, for what chooses anew in each pass or drops tokens."""
    wanted = {
        "--moe-router-load-balancing-type": (config.moe_router_load_balancing_type, "none"),
        "--moe-router-fusion": (config.moe_router_fusion, False),
        "--moe-expert-capacity-factor": (config.moe_expert_capacity_factor, None),
        "--moe-z-loss-coeff": (config.moe_z_loss_coeff, None),
        "--moe-input-jitter-eps": (config.moe_input_jitter_eps, None),
        "--moe-router-force-load-balancing": (config.moe_router_force_load_balancing, False),
        "--moe-router-force-biased": (config.moe_router_force_biased, None),
        "--moe-enable-routing-replay": (config.moe_enable_routing_replay, False),
        "--moe-permute-fusion": (config.moe_permute_fusion, False),
        "--moe-shared-expert-overlap": (config.moe_shared_expert_overlap, False),
        "--moe-token-dispatcher-type": (config.moe_token_dispatcher_type, "alltoall"),
    }
    for flag, (found, needed) in wanted.items():
        if found != needed:
            raise ValueError(f"{flag} {found} is not supported: routing is recorded and repeated, which needs {needed}")
    if config.recompute_granularity == "selective" and set(config.recompute_modules or ()) - {"mlp"}:
        raise ValueError("--recompute-modules other than mlp would route again after the record is gone")


class ExpertRoutingAdapter:
    """The sweeps' view of one router."""

    def __init__(self, layer: ReplayMoELayer):
        self.module = layer.router
        self.layer_number = self.module.layer_number
        self.key = ("router", self.layer_number)

    def open(self, segment: SegmentState, policy: StatePolicy) -> RoutingRecord:
        """No block recorded yet."""
        record = RoutingRecord(
            segment=segment.name, layer_number=self.layer_number, owner=self.module.cp_group.rank(),
            num_experts=self.module.num_experts, residency=policy.page_residency,
        )
        policy.ledger.watch(record)
        return record

    def foresee(self, segment, policy, dtype, *, stops) -> list[LedgerEntry]:
        """The experts of each token."""
        tokens, width = segment.rows_before(len(segment.plan)), 1 if self.module.num_experts <= 256 else 2
        found = [] if stops else [("routing", tokens * self.module.topk * width, policy.page_residency)]
        return foreseen(segment, self.layer_number, tokens, found)

    def restore(self, segment, block, policy, *, replay, stop_here, live=False) -> RoutingRun:
        """The block's recorded experts in a replay; before, those that the segment prescribes."""
        recorded = segment.layers[self.key].read(block, current_device()) if replay else None
        if recorded is None and segment.routes is not None:
            given = segment.routes[self.layer_number][:, own_columns(segment, block)]
            recorded = given.transpose(0, 1).flatten(0, 1).to(current_device())  # as the router's rows: tokens, then batch
        return RoutingRun(segment.plan[block], stop_here, recorded)

    def capture(self, run: RoutingRun, segment: SegmentState, block: int) -> None:
        """Keep the experts that the pass used; none in the last layer of a block that only leaves its state."""
        if run.used is not None:
            segment.layers[self.key].keep(block, run.used)

    def prepare(self, segment: SegmentState) -> None:
        """Nothing: a choice has no adjoint."""

    def replay_roots(self, run: RoutingRun, segment: SegmentState, block: int) -> list[Root]:
        """None: a choice has no gradient."""
        return []

    def pass_adjoint(self, run: RoutingRun, segment: SegmentState, block: int) -> None:
        """Drop the block's record: it has been differentiated."""
        segment.layers[self.key].drop(block)

    def forget(self, segment: SegmentState, block: int) -> None:
        """Drop the block's record."""
        segment.layers[self.key].drop(block)

    def select_batch(self, segment: SegmentState, index: torch.Tensor) -> None:
        """Nothing: later blocks choose for their own tokens."""

    def partial_over_tp(self) -> list[torch.nn.Parameter]:
        """None: experts run without tensor parallelism."""
        return []
