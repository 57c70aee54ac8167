"""The phases of one step on the groups of this rank: capture, score, replay. The gradient lands in DDP's buffers.

Every rank of a model replica calls these with the same groups. Replicas (data parallel) may have different numbers of
groups and responses: nothing here is collective over them, except the counts that the loss is divided by.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from longstraw.objectives.config import ObjectiveConfig
from longstraw.objectives.loss_weights import all_reduce_loss_counts, compute_loss_weights, count_loss_terms
from longstraw.objectives.losses import LossStatistics
from longstraw.objectives.mismatch import MismatchConfig, exceeds_bound, importance_weights, mismatch_statistics
from longstraw.prompt_state.ledger import LedgerEntry
from longstraw.segments import SegmentState, prompt_segment
from longstraw.sweeps import ReplayEngine
from longstraw.transaction.group import GroupLoss, PromptGroup, make_batches, rollout_log_ratio, split_logprobs
from longstraw.transaction.reference import ReferencePolicy


class StepInterrupted(Exception):
    """A stop was asked for: the step is rolled back at the next boundary between two pieces of work."""


@dataclass(eq=False)
class ReplayResult:
    """This rank's share of the step's loss, and its statistics (None where it had no response).

    auxiliary_loss: this rank's share of what layers added (the indexer's loss); `loss` is without it.
    """

    loss: float
    statistics: LossStatistics | None
    auxiliary_loss: float = 0.0


class Step:
    """One step of a policy.

    dp: the data-parallel group without context parallelism. responses_together: responses replayed in one batch.
    check_stop: called between pieces of work; raises StepInterrupted on all ranks of a replica together. mismatch: what is
    done where sampler and trainer disagree. replays_routes: rows of responses go to the experts that the sampler sent them
    to.
    """

    def __init__(
        self, engine: ReplayEngine, objective: ObjectiveConfig, *, dp: dist.ProcessGroup, responses_together: int = 1,
        reference: ReferencePolicy | None = None, check_stop: Callable[[], None] = lambda: None,
        mismatch: MismatchConfig = MismatchConfig(), replays_routes: bool = False,
    ):
        self.engine, self.objective, self.dp = engine, objective, dp
        self.responses_together, self.reference, self.check_stop = responses_together, reference, check_stop
        self.mismatch, self.replays_routes = mismatch, replays_routes
        self.fullest_state: list[LedgerEntry] = []  # the ledger when it held most
        self.states_kept = 0  # how many groups, from the last on, keep their states after the replay, for a probe of the step

    def capture(self, prompt: torch.Tensor, *, for_replay: bool = False) -> SegmentState:
        """Phase 1: the state that a prompt [1, P] leaves, under the present weights.

        for_replay: its replay is to follow under the same weights, and may use graphs that the capture keeps.
        """
        constant = self.engine.config.semantics == "response_only"
        return self.engine.forward_sweep(prompt_segment(prompt), None, constant=constant, for_replay=for_replay)[0]

    def score(self, group: PromptGroup, *, routed: bool = False) -> list[torch.Tensor]:
        """Phase 2: log-probabilities [T] of each response under the present weights, from the group's live state.

        routed: with the sampler's choices of experts.
        """
        scores: list[torch.Tensor] = []
        for indices, segment in make_batches(group, self.responses_together, routed=routed):
            self.check_stop()
            _, logprobs = self.engine.forward_sweep(segment, group.state)
            scores += split_logprobs(group, indices, logprobs)
        return scores

    def score_reference(self, groups: list[PromptGroup]) -> None:
        """Phase 2, reference: its own captures and scores. No group's policy state may be alive.

        Replicas that share experts swap them together: none leaves before all have scored.
        """
        for group in groups:
            if group.state is not None:
                raise RuntimeError(f"prompt {group.prompt_id}: only one prompt state is alive at a time")
        with self.reference.swapped_in():
            for group in groups:
                group.state = self.capture(group.prompt)
                group.ref_logprobs = self.score(group)
                group.state = None
            self.engine.finish_phase()

    def mask_mismatched(self, groups: list[PromptGroup]) -> int:
        """Leave out of the loss the responses about which sampler and trainer disagree by more than the bound -> how many.

        Scores every group under the present weights, from its own capture where its state is not alive; of a single group
        the state stays alive for its replay. The scores are not kept as old log-probabilities: those of the replay itself
        make the ratio exactly 1.
        """
        masked = 0
        for group in groups:
            if not any(group.kept):
                continue
            if group.state is None:
                self.check_stop()
                group.state = self.capture(group.prompt, for_replay=len(groups) == 1)
            for index, logprobs in enumerate(self.score(group, routed=self.replays_routes)):
                if group.kept[index] and exceeds_bound(rollout_log_ratio(group, index, logprobs), self.mismatch):
                    group.kept[index] = False
                    masked += 1
            group.state = group.state if len(groups) == 1 else None
        return masked

    def count_terms(self, groups: list[PromptGroup]):
        """What the whole step's loss is divided by: collective over data parallel."""
        masks = [mask for group in groups for mask in group.loss_masks()]
        device = self.engine.model.embedding.word_embeddings.weight.device
        return all_reduce_loss_counts(count_loss_terms(masks), self.dp, device=device)

    def replay(self, groups: list[PromptGroup], counts) -> ReplayResult:
        """Phase 4: every group's exact gradient. Needs advantages.

        counts: of the whole step, from `count_terms`. Each group's state is captured where it is not alive, and used up.
        Old log-probabilities that are missing are those of the replay itself: the weights that sampled are the present
        ones, and the ratio is exactly 1.
        """
        loss, statistics, self.engine.auxiliary_loss = 0.0, None, 0.0
        for index, group in enumerate(groups):
            weights = compute_loss_weights(group.loss_masks(), self.objective, counts=counts)
            if group.state is None:
                self.check_stop()
                group.state = self.capture(group.prompt, for_replay=True)
            part, found = self._replay_group(group, weights, keep=index >= len(groups) - self.states_kept)
            loss += part
            for item in found:
                statistics = item if statistics is None else statistics + item
        return ReplayResult(loss, statistics, self.engine.auxiliary_loss)

    def _replay_group(
        self, group: PromptGroup, weights: list[torch.Tensor], *, keep: bool = False
    ) -> tuple[float, list[LossStatistics]]:
        state, loss, found = group.state, 0.0, []
        state.outlives = keep
        if not state.constant:
            self.engine.prepare_adjoints(state)
        scored: dict[int, torch.Tensor] = {}
        for indices, segment in make_batches(group, self.responses_together, routed=self.replays_routes):
            if not any(group.kept[i] for i in indices):
                continue
            self.check_stop()
            segment.row_weights = torch.nn.utils.rnn.pad_sequence([weights[i] for i in indices], batch_first=True)
            made: list[GroupLoss] = []

            def make_loss(logprobs: torch.Tensor) -> GroupLoss:
                current = split_logprobs(group, indices, logprobs)
                known = group.old_logprobs
                old = current if known is None else [known[i] for i in indices]
                scored.update(zip(indices, current))
                factors = self._weigh_mismatch(group, indices, old)
                made.append(GroupLoss(
                    group, indices, weights, self.objective, segment.length, old=old, current=current, factors=factors,
                ))
                return made[0]

            loss += self.engine.score_and_replay(segment, state, make_loss)
            if made[0].statistics is not None:
                found.append(made[0].statistics)
        if group.old_logprobs is None and len(scored) == len(group.samples):
            group.old_logprobs = [scored[i] for i in range(len(group.samples))]
        self.check_stop()
        self._note_state()
        if not state.constant:
            self.engine.reverse_sweep(prompt_segment(group.prompt), state)
        group.state = state if keep else None
        return loss, found

    def _weigh_mismatch(
        self, group: PromptGroup, indices: list[int], old: list[torch.Tensor]
    ) -> list[torch.Tensor] | None:
        """The importance weights [T] of a batch's responses, if there are to be any; their mismatch goes to the group."""
        factors = []
        for index, logprobs in zip(indices, old):
            ratio = rollout_log_ratio(group, index, logprobs)
            factors.append(importance_weights(ratio, self.mismatch))
            if group.kept[index]:
                found = mismatch_statistics(ratio, self.mismatch)
                group.mismatch = found if group.mismatch is None else group.mismatch + found
        return None if self.mismatch.rollout_is == "none" else factors

    def _note_state(self) -> None:
        """Keep the ledger's answer where it holds the most bytes so far: after a group's replays, before its prompt's."""
        entries = self.engine.ledger.entries()
        if sum(e.bytes for e in entries) > sum(e.bytes for e in self.fullest_state):
            self.fullest_state = entries
