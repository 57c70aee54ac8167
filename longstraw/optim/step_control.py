"""How far to go along a direction so that the policy moves by a given KL: predicted before the step is taken.

C probe contexts of a call, V vocabulary entries of this rank, |P| probe contexts in all, T sampling temperature.

With z the logits, zdot their derivative along the direction D, p = softmax(z / T), a step alpha D moves the policy by

    KL(alpha) = q alpha^2 + O(alpha^3),     q = 1 / (2 |P| T^2) * sum over contexts of Var_{v~p}[zdot_v]

so the budget delta allows alpha = min(alpha_max, sqrt(delta / q)). q comes from zdot (forward-mode derivative), or from
the KL measured a small step to both sides, where the odd orders cancel:

    q = (KL(h) + KL(-h)) / (2 h^2) + O(h^2)

The measured KL is taken from differences of logits, never of logarithms of probabilities, which would cancel: with
x = (z' - z) / T minus its mean under p, KL(p || p') = log(1 + E_p[e^x - 1 - x]). What limits it is the rounding of
the logits themselves: those of a bfloat16 model move by less than their own rounding at the KLs of a training step, so
finite differences there want float32 activations, or steps as large as alpha_max.

Part of the budget is spent before the step: rollout and trainer disagree at equal weights (other kernels, other
precision). A moving average of that KL is taken from the budget, of which at least half always stays.

Vocabulary parallel: each rank passes its columns and the group; ranks whose columns are all padding pass V = 0. Sums
over contexts are float64 and add up over blocks and ranks.

Left out: how probe contexts are chosen, and what of the prompt state moves with D (`perturbed_linear` does the moving).
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

SERIES_BELOW = 0.1
PROBE_SHARE = 0.1  # of the budget: the KL at which finite differences may be taken
PROBE_TRIES = 30  # steps of a probe, each at most half of the one before


class StepControlError(RuntimeError):
    """q, a KL or the budget cannot give a step: roll the step back."""


@torch.no_grad()
def sum_logit_variance(
    logits: torch.Tensor,
    derivatives: torch.Tensor,
    *,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Sum over contexts of Var_{v~softmax(z/T)}[zdot_v]: [] float64, the same on every rank of the group.

    Args:
        logits, derivatives: [C, V] z and zdot of this rank's real vocabulary entries; C may be 0.
        group: the ranks that share the vocabulary; None is one rank.
    """
    _check_pair(logits, derivatives, temperature)
    probabilities = _softmax(logits, temperature, group)
    values = derivatives.to(probabilities.dtype)
    mean = _sum_over((probabilities * values).sum(-1), group)
    variance = _sum_over((probabilities * (values - mean[:, None]).square()).sum(-1), group)
    return variance.sum(dtype=torch.float64)


@torch.no_grad()
def sum_kl(
    logits: torch.Tensor,
    moved_logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Sum over contexts of KL(softmax(z/T) || softmax(z'/T)): [] float64. Arguments as `sum_logit_variance`."""
    _check_pair(logits, moved_logits, temperature)
    probabilities = _softmax(logits, temperature, group)
    shift = (moved_logits.to(probabilities.dtype) - logits.to(probabilities.dtype)) / temperature
    shift -= _sum_over((probabilities * shift).sum(-1), group)[:, None]
    excess = _sum_over((probabilities * _exp_minus_line(shift)).sum(-1), group)
    return excess.log1p().sum(dtype=torch.float64)


def kl_rate(total_variance: float | torch.Tensor, num_contexts: int, *, temperature: float = 1.0) -> float:
    """q from the sum of variances over all |P| probe contexts.

    Raises:
        StepControlError: q is not finite.
        ValueError: there is no context.
    """
    if num_contexts < 1:
        raise ValueError("A predicted KL needs at least one probe context: raise --kl-probe-tokens.")
    return _usable(float(total_variance) / (2.0 * num_contexts * temperature**2), "q, the predicted KL at alpha 1,")


def rate_from_kl(kl_ahead: float, kl_behind: float, probe_step: float) -> float:
    """q from the mean KL measured at steps +probe_step and -probe_step along D.

    Raises:
        StepControlError: a KL is not finite or negative.
    """
    if not 0.0 < probe_step < math.inf:
        raise ValueError(f"--kl-probe-step must be above 0 and finite, got {probe_step}.")
    ahead, behind = (_usable(float(kl), "the KL of a probe step") for kl in (kl_ahead, kl_behind))
    return (ahead + behind) / (2.0 * probe_step**2)


def differences_within(budget: float, measure_kl: Callable[[float], float], *, start: float) -> float:
    """q by central differences at the longest step, from `start` down, whose own KL is well inside the budget.

    A step whose KL is above the budget measures a curvature that the step to be taken never sees. The error of a central
    difference falls with the square of the step, that is, with the KL measured there.

    Args:
        budget: KL that the step may have, nats.
        measure_kl: alpha (of either sign) -> mean KL.
        start: the first alpha tried.

    Raises:
        StepControlError: a KL is not finite or negative, or after PROBE_TRIES steps none is inside.
    """
    size = start
    for _ in range(PROBE_TRIES):
        rate = rate_from_kl(measure_kl(size), measure_kl(-size), size)
        if rate * size**2 <= PROBE_SHARE * budget:
            return rate
        size = min(size / 2, math.sqrt(0.5 * PROBE_SHARE * budget / rate))
    raise StepControlError(
        f"The step is refused: at alpha {size:g} the measured KL is still above {PROBE_SHARE:g} of the budget {budget:g}."
    )


def choose_alpha(rate: float, budget: float, *, alpha_max: float = 3.0) -> float:
    """min(alpha_max, sqrt(budget / q)): with a KL of four times the budget predicted at alpha 1, alpha is 1/2.

    A q of 0 (a direction that moves no logit) gives alpha_max.

    Raises:
        StepControlError: q or the budget is not finite or negative.
    """
    rate, budget = _usable(float(rate), "q, the predicted KL at alpha 1,"), _usable(float(budget), "the KL budget")
    # Compared as squares first: a tiny q would overflow the quotient.
    return alpha_max if budget >= rate * alpha_max**2 else math.sqrt(budget / rate)


def predicted_kl(rate: float, alpha: float) -> float:
    """q alpha^2."""
    return rate * alpha**2


def scheduled_budget(
    step: int, *, start: float, final: float, steps: int, schedule: str = "cosine"
) -> float:
    """The KL budget delta of a step, counted from 0.

    constant: `start` always. cosine: from `start` in step 0 along half a cosine to `final` in step `steps`, and `final`
    from there on.
    """
    if schedule == "constant":
        return start
    if schedule != "cosine":
        raise ValueError(f"--kl-budget-schedule must be constant or cosine, got {schedule!r}.")
    if steps < 1 or step < 0:
        raise ValueError(f"--kl-budget-steps must be at least 1 and steps count from 0, got {steps} and {step}.")
    return final + (start - final) * 0.5 * (1.0 + math.cos(math.pi * min(step / steps, 1.0)))


def update_mismatch(average: float | None, measured: float, *, weight: float = 0.3) -> float:
    """The moving average of KL(rollout || trainer) after one more measurement; None before the first, which it then is.

    Raises:
        StepControlError: the measurement is not finite. An estimate from samples may be slightly negative.
    """
    measured = _finite(float(measured), "the KL between rollout and trainer")
    return measured if average is None else average + weight * (measured - average)


def subtract_mismatch(budget: float, average: float | None, *, floor: float = 0.5) -> float:
    """What of the budget is left for the step: the mismatch is taken away, but `floor` of the budget always stays.

    A negative average (noise of an estimate) adds nothing.
    """
    return max(budget - max(average or 0.0, 0.0), floor * budget)


def ratio_step(weight_square_norm: float, update_square_norm: float, ratio: float) -> float:
    """eta such that ||eta U A|| = ratio ||W||, from the two sums of squares over whatever is meant to share one eta.

    0 where the direction is 0.

    Raises:
        StepControlError: a norm is not finite.
    """
    weight = _usable(float(weight_square_norm), "the weights' square norm")
    update = _usable(float(update_square_norm), "the update's square norm")
    return ratio * math.sqrt(weight) / math.sqrt(update) if update > 0.0 else 0.0


def naive_variance(logits: torch.Tensor, derivatives: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """The specification of `sum_logit_variance`, whole vocabulary."""
    p = torch.softmax(logits.double() / temperature, -1)
    zdot = derivatives.double()
    return ((p * zdot.square()).sum(-1) - (p * zdot).sum(-1).square()).sum()


def naive_kl(logits: torch.Tensor, moved_logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """The specification of `sum_kl`, whole vocabulary."""
    p, moved = (torch.log_softmax(z.double() / temperature, -1) for z in (logits, moved_logits))
    return (p.exp() * (p - moved)).sum()


def _softmax(logits: torch.Tensor, temperature: float, group: dist.ProcessGroup | None) -> torch.Tensor:
    """This rank's columns of softmax(z / T), [C, V] in float32 or wider."""
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    highest = scaled.amax(-1) if scaled.shape[1] else scaled.new_full(scaled.shape[:1], -math.inf)
    if group is not None and group.size() > 1 and highest.numel():
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    exponentials = scaled.sub_(highest[:, None]).exp_()
    return exponentials.div_(_sum_over(exponentials.sum(-1), group)[:, None])


def _sum_over(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is not None and group.size() > 1 and values.numel():
        dist.all_reduce(values, group=group)
    return values


def _exp_minus_line(x: torch.Tensor) -> torch.Tensor:
    """e^x - 1 - x, also where x is small: there the difference would cancel, so its series is summed."""
    near = x.clamp(-SERIES_BELOW, SERIES_BELOW)
    series = torch.ones_like(near)
    for order in range(9, 2, -1):
        series = 1.0 + near / order * series
    return torch.where(x.abs() <= SERIES_BELOW, 0.5 * near.square() * series, x.expm1() - x)


def _check_pair(logits: torch.Tensor, other: torch.Tensor, temperature: float) -> None:
    if logits.dim() != 2 or other.shape != logits.shape:
        raise ValueError(f"Two [C, V] of one shape are needed, got {list(logits.shape)} and {list(other.shape)}.")
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"A predicted KL needs --sampling-temperature above 0, got {temperature}.")


def _finite(value: float, what: str) -> float:
    if not math.isfinite(value):
        raise StepControlError(f"The step is refused: {what} is {value}.")
    return value


def _usable(value: float, what: str) -> float:
    if _finite(value, what) < 0.0:
        raise StepControlError(f"The step is refused: {what} is negative, {value}.")
    return value
