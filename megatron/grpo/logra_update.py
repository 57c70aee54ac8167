"""One step of LoGRA: sum, check, predict, move; refused whole where a prediction is not a finite number.

    alpha    how far: 1, or what the KL budget allows (--update-step-size predicted-kl)
    eta      length of a step at alpha 1: --logra-update-ratio ||W|| / ||D||, or --lr
    q        predicted KL at alpha 1; kappa: measured over predicted KL of the step that was taken

The probe reads responses of the prompts that were replayed last (--kl-probe-prompts), whose states are still there; so it
costs passes over a few responses and none over a prompt (unless --kl-probe-scope full).

The mismatch, a moving average of the KL between rollout and trainer at equal weights, is taken from the budget. It is
estimated from the sampled tokens, so a truncated rollout distribution (top-p, top-k) counts as one.
"""

import math
from argparse import Namespace
from collections.abc import Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from longstraw.objectives.mismatch import all_reduce_mismatch
from longstraw.optim.config import LograConfig
from longstraw.optim.optimizer import StepDirection
from longstraw.optim.step_control import (
    StepControlError, choose_alpha, predicted_kl, scheduled_budget, subtract_mismatch, update_mismatch,
)
from longstraw.optim.update import projection_gram, sketch_cosine, update_square_norm
from longstraw.patches.device import cuda_means_cpu
from longstraw.patches.finalize_model_grads import finalize_gradients
from longstraw.transaction.commit import StepRejected
from longstraw.transaction.group import PromptGroup
from longstraw.transaction.kl_probe import KlProbe
from longstraw.transaction.step import Step
from megatron.grpo.logra import LograOptimizer
from megatron.grpo.optimizer import clip_gradients
from megatron.grpo.weight_deltas import DeltaFolder
from megatron.grpo.weight_update import check_finite, count_buffers, count_state


class LograUpdate:
    """See `megatron.grpo.weight_update.WeightUpdate`."""

    def __init__(
        self, args: Namespace, config: LograConfig, ddp, optimizer: LograOptimizer, scheduler, groups, step: Step, *,
        resumed_step: int = 0,
    ):
        self.args, self.config, self.ddp, self.optimizer, self.scheduler = args, config, ddp, optimizer, scheduler
        self.groups, self.adapters, self.logra = groups, step.engine.adapters, optimizer.logra
        self.states_kept = config.kl_probe_prompts if config.update_step_size == "predicted-kl" else 0
        self.deltas = None  # notes each update before the weights move: a DeltaFolder, or what --weight-sync delta needs
        if config.logra_delta_dir:
            self.deltas = DeltaFolder(config.logra_delta_dir, optimizer, resumed_step=resumed_step)
        self.probe = KlProbe(step, config, optimizer.updated_model.moved, groups.dp_cp)

    @contextmanager
    def accumulating(self, number: int):
        """A new draw of A where it is due, sketches at zero; DDP without a reduction after each backward."""
        self.logra.restart(number - 1)
        with self.ddp.no_sync():
            yield

    def take(self, number: int, groups: Sequence[PromptGroup]) -> dict:
        """See `WeightUpdate`."""
        self._sum_and_check(number)
        learning_rate = self.optimizer.rates["lr"]
        rest_norm = self._prepare_rest(number)
        probed = groups[-self.config.kl_probe_prompts :]
        try:
            direction = self.logra.prepare(self._dense_gradients())
            mismatch = self._measure_mismatch(groups)
            chosen = self._choose_step(number, direction, probed, learning_rate, mismatch)
            figures = self._describe(direction, chosen["step"])
            if figures["update_ratio"] > 1.0:
                raise StepControlError(
                    f"The step is refused: it would move the weights by {figures['update_ratio']:.3g} of their own norm."
                )
        except StepControlError as error:
            self.logra.forget()
            if self.config.kl_refused_step == "stop":
                raise StepRejected(f"step {number}: {error}") from error
            return self._refuse(learning_rate)
        step = chosen.pop("step")
        if self.deltas is not None:
            self.deltas.note(number, step)
        self.logra.apply(step)
        if self.optimizer.rest is not None:
            with cuda_means_cpu():
                self.optimizer.rest.step_with_ready_grads()
        self.scheduler.step(increment=1)
        self.optimizer.mismatch = mismatch
        measured = self._measure_step(chosen.pop("base", None), probed, chosen)
        self.clear()
        written = {} if self.deltas is None else self.deltas.finish()
        return figures | rest_norm | written | {"learning_rate": learning_rate, "step_refused": 0} | chosen | measured

    def describe_rest(self) -> dict:
        """See `WeightUpdate`."""
        return {"grad_norm": 0.0, "learning_rate": self.optimizer.rates["lr"]}

    def clear(self) -> None:
        """Drop the direction; empty DDP's buffers. The sketches are emptied when the next step starts."""
        self.optimizer.zero_grad(set_to_none=True)
        self.ddp.zero_grad_buffer()

    def count_bytes(self) -> dict[str, int]:
        """See `WeightUpdate`. "gradients" are sketches, the drawn words of A, and DDP's buffers."""
        held, rest = self.logra.state_bytes(), self.optimizer.rest
        return {
            "gradients": count_buffers(self.ddp) + held["sketches"] + held["projections"],
            "optimizer": held["optimizer"] + (0 if rest is None else count_state(rest, self.ddp.module)),
        }

    def _sum_and_check(self, number: int) -> None:
        finalize_gradients(self.ddp, self.adapters, self.groups)
        self.logra.reduce()
        if self.ddp.buffers or self.ddp.expert_parallel_buffers:
            check_finite(number, self.ddp, self.groups)
        names = self.logra.find_nonfinite()
        if names:
            raise StepRejected(f"step {number}: the gradient of {', '.join(names[:5])} is not finite")

    def _prepare_rest(self, number: int) -> dict:
        """Adam's gradients of the rest, clipped and ready; nothing moves yet."""
        rest = self.optimizer.rest
        if rest is None:
            return {}
        with cuda_means_cpu():
            rest.prepare_grads()
        norm = clip_gradients(rest)
        if not math.isfinite(norm):
            raise StepRejected(f"step {number}: the gradient's norm is {norm}")
        return {"rest_grad_norm": norm}

    def _dense_gradients(self) -> dict[str, torch.Tensor] | None:
        if self.config.update_direction == "sketch":
            return None
        return {weight.name: matrix.weight.main_grad for matrix, weight in self.optimizer.updated_model.pairs}

    def _choose_step(
        self, number: int, direction: StepDirection, probed: Sequence[PromptGroup], learning_rate: float,
        mismatch: float | None,
    ) -> dict:
        """The metrics of the choice, with "step", what D is multiplied by, and "base", the probed policy."""
        config = self.config
        if config.update_step_size == "learning-rate":
            clip, norm = self.args.clip_grad, direction.gradient_norm
            clipped = clip / norm if config.update_rule != "adam" and 0.0 < clip < norm else 1.0
            return {"step": learning_rate * clipped}
        if config.update_step_size == "update-ratio":
            return {"step": direction.eta, "alpha": 1.0}
        budget = scheduled_budget(
            number - 1, start=config.kl_budget, final=config.kl_budget_final,
            steps=config.kl_budget_steps or max(1, self.args.train_iters - 1), schedule=config.kl_budget_schedule,
        )
        left = subtract_mismatch(budget, mismatch, floor=config.kl_budget_floor)
        if direction.direction_norm == 0.0:  # every group's rewards were equal: there is no direction to choose along
            return {"step": 0.0, "alpha": 0.0, "kl_rate": 0.0, "kl_budget": left, "kl_predicted": 0.0}
        base = self.probe.open(probed, direction.eta)
        rate = self.probe.measure_rate(base, probed, direction.eta, budget=left)
        alpha = choose_alpha(rate, left, alpha_max=config.kl_alpha_max)
        return {
            "step": alpha * direction.eta, "base": base, "alpha": alpha, "kl_rate": rate, "kl_budget": left,
            "kl_predicted": predicted_kl(rate, alpha),
        }

    def _measure_mismatch(self, groups: Sequence[PromptGroup]) -> float | None:
        """The moving average with this step's KL(rollout || trainer), from the sampled tokens. Collective."""
        if self.config.update_step_size != "predicted-kl":
            return None
        device = next(self.ddp.module.parameters()).device
        found = [group.mismatch for group in groups if group.mismatch is not None]
        measured = all_reduce_mismatch(found, self.groups.dp, device=device).estimate_kl()
        if measured is None:
            return self.optimizer.mismatch
        return update_mismatch(self.optimizer.mismatch, measured, weight=self.config.kl_mismatch_weight)

    def _measure_step(self, base, probed: Sequence[PromptGroup], chosen: dict) -> dict:
        """The KL that the step did move the policy by, at the probe's contexts."""
        if base is None:
            return {}
        measured = self.probe.measure_kl(base, probed)
        predicted = chosen["kl_predicted"]
        kappa = {"kappa": measured / predicted} if predicted > 0.0 else {}
        return {"kl_measured": measured, "kl_mismatch": self.optimizer.mismatch or 0.0} | kappa

    def _describe(self, direction: StepDirection, step: float) -> dict:
        ratio = step * direction.direction_norm / direction.weight_norm if direction.weight_norm else 0.0
        figures = {"grad_norm": direction.gradient_norm, "update_ratio": ratio}
        name = self.config.logra_cosine_of
        return figures | ({"sketch_cosine": self._measure_cosine(name)} if name else {})

    def _measure_cosine(self, name: str) -> float:
        """cos(G, G A^T A) of one matrix whose gradient is also formed. Collective."""
        weight = next(weight for weight in self.logra.weights if weight.name == name)
        sketch = weight.sketch
        gram = projection_gram(sketch.projection, dtype=sketch.sketch.dtype, device=sketch.sketch.device)
        norms = torch.stack([
            sketch.sketch.double().square().sum(), update_square_norm(sketch.sketch, gram),
            sketch.dense.double().square().sum(),
        ])
        shared = weight.placement.split == "columns"  # its sketch is whole on every rank of TP, its gradient is not
        if self.groups.tp.size() > 1:
            total = norms.clone()
            dist.all_reduce(total, group=self.groups.tp)
            norms = torch.stack([*(norms[:2] if shared else total[:2]), total[2]])
        return sketch_cosine(*norms.tolist())

    def _refuse(self, learning_rate: float) -> dict:
        """The metrics of a step that was given up: the weights, the moments and the schedules stay."""
        self.clear()
        return {"grad_norm": 0.0, "learning_rate": learning_rate, "step_refused": 1}
