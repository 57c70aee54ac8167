"""The training loop: one GRPO step after another, each a transaction that commits whole or changes nothing.

A step: get scored groups from where they come, score the reference, count what the loss is divided by, replay every
group under autograd, and let the weight update sum the gradient across ranks once, check it and move the weights. A phase
that fails or is stopped on one rank is rolled back on all: between two collectives over the whole world, ranks agree on the
outcome.

Left out: building the model and the command line (`train`).
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from longstraw.memory_meter import read_peak_bytes, reset_peak_bytes
from longstraw.objectives.advantages import RewardBaseline, UniformGroupsError
from longstraw.objectives.losses import LossStatistics, all_reduce_loss_statistics
from longstraw.objectives.mismatch import all_reduce_mismatch
from longstraw.receipts.recorder import RunRecorder
from longstraw.transaction.commit import StepRejected, StepSnapshot, agree_on_failure, check_loss
from longstraw.transaction.group import PromptGroup
from longstraw.transaction.step import ReplayResult, Step, StepInterrupted
from megatron.grpo.agreed_writes import WriteFailure
from megatron.grpo.evaluation import evaluate
from megatron.grpo.prompt_order import PromptOrder
from megatron.grpo.prompts import Prompt
from megatron.grpo.random_states import collect_random_states, restore_random_states
from megatron.grpo.reward_scoring import RewardScorer
from megatron.grpo.rewards import RewardFailure
from megatron.grpo.rollouts import RolloutSource, set_advantages
from megatron.grpo.run_config import TrainConfig
from megatron.grpo.samplers import ResidentSampler, SamplingFailure
from megatron.grpo.stop_signal import StopSignal
from megatron.grpo.weight_lineage import WeightLineage, list_rates
from megatron.grpo.weight_sync import WeightSync
from megatron.grpo.weight_update import WeightUpdate


@dataclass(eq=False)
class TokenCounts:
    """What the committed steps have trained on, on this replica."""

    prompts: int = 0
    responses: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    loss_tokens: int = 0

    def add(self, groups: list[PromptGroup]) -> None:
        """Count a committed step's groups."""
        self.prompts += len(groups)
        for group in groups:
            self.responses += len(group.samples)
            self.prompt_tokens += group.prompt.shape[1]
            self.response_tokens += sum(len(sample.token_ids) for sample in group.samples)
            self.loss_tokens += sum(int(mask.sum()) for mask in group.loss_masks())


class Trainer:
    """Runs steps on this rank, in step with all others.

    rollouts: gives each step's groups, and moves `order` on. sampler: for evaluations. save: called as save(step) to write a
    checkpoint. describe_step: called as describe_step(step, metrics, trainer) once a step is on record. baseline: what rewards
    are compared with under running_mean. lineage: of the weights, where they or their rollouts are shared.
    """

    def __init__(
        self, *, args, config: TrainConfig, groups, update: WeightUpdate, step: Step, rollouts: RolloutSource,
        scorer: RewardScorer, sampler: ResidentSampler, eval_prompts: list[Prompt], order: PromptOrder,
        recorder: RunRecorder, stop: StopSignal, save: Callable[[int], object], baseline: RewardBaseline,
        weight_sync: WeightSync | None = None, describe_step: Callable[[int, dict, "Trainer"], None] | None = None,
        lineage: WeightLineage | None = None,
    ):
        self.args, self.config, self.groups, self.update = args, config, groups, update
        self.step, self.rollouts, self.scorer, self.sampler = step, rollouts, scorer, sampler
        self.eval_prompts, self.order = eval_prompts, order
        self.recorder, self.stop, self.save, self.baseline = recorder, stop, save, baseline
        self.weight_sync, self.lineage = weight_sync, lineage
        self.describe_step = describe_step
        self.rewards: list[float] = []  # of this replica's responses of the step that take part
        self.world = dist.group.WORLD
        self.device = sampler.device
        self.unwritten: WriteFailure | None = None  # why a committed step's weights could not be left for the engine
        self.counts = TokenCounts()
        self.rollout_lag = 0  # steps between the weights that sampled the last committed step's responses and those it trained
        self.started = time.perf_counter()

    def train(self, first_step: int) -> int:
        """Steps `first_step` to --train-iters; returns the last step committed. Stops early, saved, on a signal."""
        done, saved = first_step - 1, first_step - 1
        last, interval = self.args.train_iters, self.args.eval_interval
        if first_step > last:
            self.recorder.console.say(f"nothing is left to do: step {done} is loaded, and --train-iters is {last}")
        for number in range(first_step, last + 1):
            try:
                before = self._evaluate_if(number == first_step)  # what the run starts from
                record = self.run_step(number)
            except StepInterrupted:
                self.recorder.console.say(f"stopped by a signal: step {number} is rolled back")
                break
            except (StepRejected, UniformGroupsError):
                if self.args.save and saved != done:
                    self.save(done)
                raise
            done = number
            due = self.unwritten is None and (number == last or bool(interval and number % interval == 0))
            after, failure = self._evaluate_after(due)
            failure = self.unwritten or failure
            if before is not None:
                record["eval_reward_mean_before"] = before
            if after is not None or before is not None:
                record["eval_reward_mean"] = before if after is None else after
            self.recorder.record_step(record)
            if self.describe_step is not None:
                self.describe_step(number, record, self)
            if failure is not None:
                if self.args.save:
                    self.save(done)
                raise failure
            if self.args.save and self.args.save_interval and number % self.args.save_interval == 0:
                self.save(number)
                saved = number
            reason = self._reason_to_end(number)
            if reason:
                self.recorder.console.say(f"{reason} after step {number}")
                break
        if self.args.save and saved != done:
            self.save(done)
        return done

    def _reason_to_end(self, number: int) -> str:
        """Why the run ends after this step although more were asked for, equal on every rank; "" to go on."""
        if self.stop.agreed(self.world):
            return "stopped by a signal"
        if self.args.exit_interval and number % self.args.exit_interval == 0:
            return "stopped by --exit-interval"
        minutes = (time.perf_counter() - self.started) / 60
        late = torch.tensor(int(minutes > (self.args.exit_duration_in_mins or math.inf)), device=self.device)
        dist.all_reduce(late, op=dist.ReduceOp.MAX, group=self.world)
        return "stopped by --exit-duration-in-mins" if late else ""

    def _evaluate_if(self, wanted: bool) -> float | None:
        if not (wanted and self.eval_prompts):
            return None
        self.scorer.forget_failures()
        value = self._phase("evaluate", lambda: evaluate(self.sampler, self.scorer, self.eval_prompts, self.groups.dp))
        failed = int(sum(self._failed_rewards()))
        if failed:
            self.recorder.console.say(f"evaluation: {failed} rewards failed, the first: {self.scorer.first_failure}")
        return None if math.isnan(value) else value

    def _evaluate_after(self, wanted: bool) -> tuple[float | None, StepRejected | None]:
        """The evaluation after a step that is committed, and to be recorded however the evaluation ends: on a signal there
        is none, and a failure comes back."""
        try:
            return self._evaluate_if(wanted), None
        except StepInterrupted:
            return None, None
        except StepRejected as failure:
            return None, failure

    def run_step(self, number: int) -> dict:
        """One step as a transaction -> its metrics.

        Raises StepInterrupted after rolling back on a signal, and StepRejected, after rolling back, when a check failed.
        """
        started = time.perf_counter()
        reset_peak_bytes()
        snapshot = StepSnapshot(
            (self.order.state_dict, self.order.load_state_dict),
            (lambda: collect_random_states({}), lambda states: restore_random_states(states, {})),
            (self.baseline.state_dict, self.baseline.load_state_dict),
        )
        self.scorer.forget_failures()
        try:
            groups = self._phase("rollout", lambda: self._roll_out(number))
            if self.lineage is not None:
                trained_on, rates = self.lineage.digest(groups), list_rates(self.update.optimizer)
            self._phase("reference", lambda: self._score_reference(groups))
            masks = self.config.mismatch.rollout_mask_above is not None
            masked = self._phase("mismatch", lambda: self.step.mask_mismatched(groups)) if masks else 0
            counts = self.step.count_terms(groups)
            if counts.num_tokens == 0:
                self.recorder.console.say(f"step {number}: no response token is trained; the weights stay as they are")
                metrics, moved = self._leave_weights(), False
            else:
                result = self._phase("replay", lambda: self._replay(number, groups, counts))
                metrics = self._commit(number, groups, result)
                moved = not metrics.get("step_refused")
            metrics |= self._describe_mismatch(groups, masked) | self._move_baseline()
        except (StepInterrupted, StepRejected):
            self._roll_back(snapshot)
            raise
        if self.lineage is not None:
            self.lineage.advance(number, trained_on, rates)
        self.counts.add(groups)
        self.rollout_lag = max((number - 1 - s.weight_version for group in groups for s in group.samples), default=0)
        self._show_failures(number)
        if self.weight_sync is not None:
            with self.recorder.clock.phase("weight_sync"):
                metrics |= self._write_weights(number, moved)
        seconds, peak_bytes = self._largest(time.perf_counter() - started, read_peak_bytes())
        return {"step": number} | self._describe(groups) | metrics | {"seconds": seconds, "peak_bytes": int(peak_bytes)}

    def _write_weights(self, number: int, moved: bool) -> dict:
        """Leave the weights of a committed step for the engine -> figures. A failure ends the run once the step is saved."""
        try:
            return self.weight_sync.write(number, changed=moved)
        except WriteFailure as failure:
            self.unwritten = failure
            return {}

    def _phase(self, name: str, work: Callable[[], object]):
        """Run a phase on this rank, then agree with all ranks on how it ended."""
        message, value = "", None
        with self.recorder.clock.phase(name):
            try:
                value = work()
            except StepInterrupted:
                message = "stop"
            except (StepRejected, RewardFailure, SamplingFailure) as error:
                message = str(error)
            self.step.engine.finish_phase()
            stopped = self.stop.agreed(self.scorer.replica)  # asked on every rank, also where the work has failed
            message = message or ("stop" if stopped else "")
            message = agree_on_failure(message, self.world)
        if message == "stop":
            raise StepInterrupted
        if message:
            raise StepRejected(message)
        return value

    def _roll_out(self, number: int) -> list[PromptGroup]:
        """This replica's scored groups of the step, with advantages."""
        groups, objective = self.rollouts.collect(number), self.config.objective
        self.rewards = [reward for group in groups for reward, kept in zip(group.rewards, group.kept) if kept]
        for group in groups:
            set_advantages(
                group, objective, mask_truncated=self.config.run.mask_truncated, baseline=self.baseline.value
            )
        return groups

    def _score_reference(self, groups: list[PromptGroup]) -> None:
        if self.step.reference is not None:
            self.step.score_reference(groups)

    def _describe_mismatch(self, groups: list[PromptGroup], masked: int) -> dict:
        """How far sampler and trainer are apart, over all replicas. Collective over data parallel."""
        found = [group.mismatch for group in groups if group.mismatch is not None]
        figures = all_reduce_mismatch(found, self.groups.dp, device=self.device).means(self.config.mismatch)
        if self.config.mismatch.rollout_mask_above is not None:
            sampled = sum(len(group.samples) for group in groups)
            counts = torch.tensor([masked, sampled], dtype=torch.float64, device=self.device)
            dist.all_reduce(counts, group=self.groups.dp)
            figures["rollout_masked_fraction"] = (counts[0] / counts[1].clamp(min=1.0)).item()
        return figures

    def _replay(self, number: int, groups: list[PromptGroup], counts) -> ReplayResult:
        self.step.states_kept = self.update.states_kept
        with self.update.accumulating(number):
            result = self.step.replay(groups, counts)
        failure = check_loss(result.loss, 0 if result.statistics is None else int(result.statistics.nan_logprobs))
        if failure:
            raise StepRejected(failure)
        return result

    def _commit(self, number: int, groups: list[PromptGroup], result: ReplayResult) -> dict:
        """Let the update check the gradient and move the weights -> loss, KL, norms and clip figures of the whole step."""
        with self.recorder.clock.phase("commit"):
            moved = self.update.take(number, groups)
            for group in groups:
                group.state = None
            losses = torch.tensor([result.loss, result.auxiliary_loss], dtype=torch.float64, device=self.device)
            dist.all_reduce(losses, group=self.groups.dp_cp)
            statistics = all_reduce_loss_statistics(self._statistics_or_zero(result), self.groups.dp_cp).means()
        if self.step.reference is None:
            statistics["kl"] = statistics["old_kl"]
        loss, auxiliary = losses.tolist()
        added = {"indexer_loss": auxiliary} if self.args.dsa_indexer_loss_coeff else {}
        return {"loss": loss} | added | moved | statistics

    def _move_baseline(self) -> dict:
        """The baseline that the step has used, as a metric; then it takes in the step's rewards. Collective."""
        objective = self.config.objective
        if objective.advantage_estimator != "running_mean":
            return {}
        used, rewards = self.baseline.value, [None] * self.groups.dp.size()
        dist.all_gather_object(rewards, self.rewards, group=self.groups.dp)
        self.baseline.update((reward for own in rewards for reward in own), decay=objective.reward_baseline_decay)
        return {"reward_baseline": used}

    def _leave_weights(self) -> dict:
        """The metrics of a step in which every response was left out: no gradient, no optimizer step."""
        statistics = self._statistics_or_zero(None).means() | {"kl": 0.0}
        return {"loss": 0.0} | self.update.describe_rest() | statistics

    def _show_failures(self, number: int) -> None:
        """Say on the console how many rewards of this replica failed, and how the first one did."""
        failed = int(sum(self._failed_rewards()))
        if failed:
            self.recorder.console.say(f"step {number}: {failed} rewards failed, the first: {self.scorer.first_failure}")

    def _statistics_or_zero(self, result: ReplayResult | None) -> LossStatistics:
        zero = torch.zeros((), device=self.device)
        return (result and result.statistics) or LossStatistics(
            num_tokens=zero, clipped_sum=zero, ratio_sum=zero, ratio_max=zero, kl_sum=zero, old_kl_sum=zero,
            nan_logprobs=zero,
        )

    def _describe(self, groups: list[PromptGroup]) -> dict:
        """Rewards and lengths of the step's groups, over all replicas."""
        samples = [sample for group in groups for sample in group.samples]
        masked = self.config.rewards.reward_failure == "mask"
        rewards = [
            reward for group in groups for reward, scored in zip(group.rewards, group.scored) if scored or not masked
        ]
        own = [
            float(len(rewards)), sum(rewards), float(len(samples)), float(sum(len(s.token_ids) for s in samples)),
            float(sum(s.finish_reason == "length" for s in samples)), *self._failed_rewards(),
        ]
        total = torch.tensor(own, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self.groups.dp)
        rewarded, sampled = max(total[0].item(), 1.0), max(total[2].item(), 1.0)
        return {
            "reward_mean": total[1].item() / rewarded, "response_tokens_mean": total[3].item() / sampled,
            "truncated_fraction": total[4].item() / sampled, "reward_timeouts": int(total[5]),
            "reward_errors": int(total[6]), "rewards_invalid": int(total[7]),
        }

    def _largest(self, *values: float) -> list[float]:
        """The largest of each value over all ranks."""
        largest = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.world)
        return largest.tolist()

    def _failed_rewards(self) -> list[float]:
        return [float(self.scorer.statuses[status]) for status in ("timeout", "error", "invalid")]

    def _roll_back(self, snapshot: StepSnapshot) -> None:
        """Leave no trace of the step: gradients cleared, random states and data position as before it."""
        self.update.clear()
        snapshot.restore()
