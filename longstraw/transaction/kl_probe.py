"""How far a step would move the policy: the KL along a direction, measured on a few responses of the step.

A probe context is a position that predicts a token of a probed response. q(D), the KL at alpha 1 to second order, comes
from derivatives of the logits along D (forward mode, `dual_passes`) or from the KL measured a small step to both sides
(`longstraw.optim.step_control` has the formulas). The weights themselves never move: `moved(step)` is a block in which the
model's products are those of W - step D.

    scope "response"   the prompt's state stays as captured; only the responses' pass moves
    scope "full"       the prompt is captured again with the moved weights: what a step really does, at its price

A probe reads responses of one or several groups (--kl-probe-prompts): how far a direction moves the policy differs between
prompts by orders of magnitude, so that q of a single one is a noisy guide where a step has many. Every rank of the world
calls every method with the groups of its replica; replicas without a group contribute no context. Experts choose anew at
moved weights, as they will after the step.

Left out: which step follows from q.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd import forward_ad

from longstraw.adapters.decoder import hidden_of_own_rows, own_output_weight
from longstraw.optim.config import LograConfig
from longstraw.optim.step_control import StepControlError, differences_within, kl_rate, sum_kl, sum_logit_variance
from longstraw.segments import Segment, SegmentState, own_columns
from longstraw.transaction.group import PromptGroup
from longstraw.transaction.step import Step

Moved = Callable[[float | torch.Tensor], AbstractContextManager]


@dataclass(eq=False)
class ProbedPolicy:
    """What the policy computes at a probe's contexts: hidden states [n, hidden] of this rank's rows.

    tangents: their derivatives along alpha, under --kl-probe jvp. contexts: their number over all ranks.
    """

    hidden: list[torch.Tensor]
    tangents: list[torch.Tensor]
    contexts: int


class KlProbe:
    """Probes of one step's direction.

    moved: see the module; its step may be a dual number. sum_group: data x context parallelism.
    """

    def __init__(self, step: Step, config: LograConfig, moved: Moved, sum_group: dist.ProcessGroup):
        self.step, self.engine, self.config, self.moved, self.sum_group = step, step.engine, config, moved, sum_group

    def open(self, groups: Sequence[PromptGroup], eta: float) -> ProbedPolicy:
        """The policy at the present weights. groups: of this replica, their prompts' states alive. eta: the length of a step
        at alpha 1.

        Under scope "full" the states are given up: other weights leave others.
        """
        hidden, tangents = self._differentiate(groups, eta) if self.config.kl_probe == "jvp" else (self._run_all(groups), [])
        self.engine.finish_phase()
        if self.config.kl_probe_scope == "full":
            for group in groups:
                group.state = None
        own = torch.tensor(float(sum(len(h) for h in hidden)), device=self._device, dtype=torch.float64)
        dist.all_reduce(own, group=self.sum_group)
        return ProbedPolicy(hidden, tangents, int(own))

    def measure_rate(self, base: ProbedPolicy, groups: Sequence[PromptGroup], eta: float, *, budget: float) -> float:
        """q: the KL per squared alpha, in nats a context. eta: the length of a step at alpha 1.

        budget: KL that the step may have; finite differences stay well inside it (`differences_within`).
        Raises StepControlError where q is not finite, or where no rank has a context: nothing would bound the step.
        """
        if not base.contexts:
            raise StepControlError("The step is refused: there is no response to probe.")
        if self.config.kl_probe == "jvp":
            total = self._sum(sum_logit_variance, list(zip(base.hidden, base.tangents)))
            return kl_rate(total, base.contexts, temperature=self.engine.temperature)
        return differences_within(
            budget, lambda alpha: self.measure_kl(base, groups, alpha * eta), start=self.config.kl_probe_step
        )

    def measure_kl(self, base: ProbedPolicy, groups: Sequence[PromptGroup], step: float = 0.0) -> float:
        """Mean KL(base || the policy at W - step D) over the contexts, nats; step 0: at the weights as they are now."""
        with self.moved(step):
            hidden = self._run_all(groups, moved=True)
            self.engine.finish_phase()
        total = self._sum(sum_kl, [(mine, other) for mine, other in zip(base.hidden, hidden)])
        return total / max(base.contexts, 1)

    def _differentiate(self, groups: Sequence[PromptGroup], eta: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Hidden states and their derivatives along alpha, in one pass."""
        hidden, tangents = [], []
        # Compiled functions (Megatron fuses small ones so) drop tangents without a word.
        with torch.compiler.set_stance("force_eager"), forward_ad.dual_level():
            zero = torch.zeros((), dtype=self._wide, device=self._device)
            with self.moved(forward_ad.make_dual(zero, torch.full_like(zero, eta))):
                found = self._run_all(groups)
            for value in found:
                primal, tangent = forward_ad.unpack_dual(value)
                hidden.append(primal.clone())
                tangents.append(torch.zeros_like(primal) if tangent is None else tangent.clone())
        return hidden, tangents

    def _share(self, groups: Sequence[PromptGroup]) -> list[tuple[PromptGroup, int]]:
        """Each group that is probed, with how many of its responses: --kl-probe-responses dealt out among them."""
        total, ways = self.config.kl_probe_responses, len(groups)
        shares = [(group, len(range(place, total, ways))) for place, group in enumerate(reversed(groups))]
        return [(group, count) for group, count in shares if count]

    def _run_all(self, groups: Sequence[PromptGroup], *, moved: bool = False) -> list[torch.Tensor]:
        """Hidden states of every probed group; moved: the weights are, and under scope "full" the prompts run anew."""
        anew = moved and self.config.kl_probe_scope == "full"
        found: list[torch.Tensor] = []
        for group, count in self._share(groups):
            found += self._run(group, self.step.capture(group.prompt) if anew else group.state, count)
        return found

    @torch.no_grad()
    def _run(self, group: PromptGroup, state: SegmentState, count: int) -> list[torch.Tensor]:
        """Hidden states [n, hidden] of this rank's rows at every context of `count` responses, batch by batch, block by
        block."""
        found: list[torch.Tensor] = []
        for segment, lengths in self._segments(group, count):
            opened = self.engine.open_segment(segment, state)
            for block in range(len(opened.plan)):
                hidden = self.engine.run_forward(segment, opened, block)
                self.engine.forget_block(opened, block)
                rows = hidden_of_own_rows(self.engine.model, hidden, opened.plan[block])
                columns = own_columns(opened, block)
                positions = torch.arange(columns.start, columns.stop, device=self._device)
                found.append(rows[positions[:, None] < lengths])
        return found

    def _segments(self, group: PromptGroup, count: int) -> list[tuple[Segment, torch.Tensor]]:
        """The probed responses, cut and padded at their ends, with their lengths [B]. As many together as in a replay, and
        at least two: a probe keeps no graph."""
        config, segments, together = self.config, [], max(2, self.step.responses_together)
        last = int(group.prompt[0, -1])
        cut = [
            torch.tensor([last, *sample.token_ids[:-1]][: config.kl_probe_tokens], device=self._device)
            for sample in group.samples[:count]
        ]
        for start in range(0, len(cut), together):
            rows = cut[start : start + together]
            inputs = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            # Forward mode takes one block: a state that is handed on from block to block carries no derivative.
            size = inputs.shape[1] if config.kl_probe == "jvp" else None
            lengths = torch.tensor([len(row) for row in rows], device=self._device)
            segments.append((Segment(f"probe{start}", inputs, block_size=size), lengths))
        return segments

    def _sum(self, function, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        """`function(logits, others)` over all pairs of hidden states, a few tokens at a time, summed over the ranks."""
        model, tokens = self.engine.model, self.engine.config.logprob_chunk_tokens
        weight, tp = own_output_weight(model, self.engine.vocab_size), model.pg_collection.tp
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for first, second in pairs:
            for start in range(0, len(first), tokens):
                logits = [h[start : start + tokens].to(self._wide) @ weight.t().to(self._wide) for h in (first, second)]
                total += function(*logits, temperature=self.engine.temperature, group=tp)
        dist.all_reduce(total, group=self.sum_group)
        return float(total)

    @property
    def _device(self) -> torch.device:
        return self.engine.model.embedding.word_embeddings.weight.device

    @property
    def _wide(self) -> torch.dtype:
        return torch.promote_types(next(self.engine.model.parameters()).dtype, torch.float32)
