"""Published objectives as settings of `ObjectiveConfig`.

Notation: G responses y_i to one prompt, rewards R_i, |y_i| trained tokens, pi the policy now, mu the policy that
sampled, ref the reference policy, rho_it = pi(y_it) / mu(y_it), A_i the advantage, N the responses of the step, and
clipped(rho, A) = min(rho A, clip(rho, 1 - low, 1 + high) A). Every loss below is minimised.

    grpo     A_i = (R_i - mean R) / std R
             L = 1/N sum_i 1/|y_i| sum_t [ -clipped(rho_it, A_i) + kl_coefficient * k3_it ]
             Shao et al. 2024, "DeepSeekMath", arXiv 2402.03300, equations 3 and 4.

    dr_grpo  A_i = R_i - mean R
             L = 1/N sum_i 1/C sum_t -clipped(rho_it, A_i)
             with one constant C for all responses, so that neither a response's length nor its group's spread weighs
             the gradient. Pass `loss_constant=C`, for instance the longest response allowed.
             Liu et al. 2025, "Understanding R1-Zero-Like Training", arXiv 2503.20783.

    dapo     A_i = (R_i - mean R) / std R
             L = 1 / (sum_i |y_i|) sum_i sum_t -clipped(rho_it, A_i), high > low, uniform groups dropped and replaced
             Yu et al. 2025, "DAPO", arXiv 2503.14476. The sum of tokens is taken over the whole step. DAPO's reward
             for over-long responses is a reward, not part of the loss; masking truncated responses is a loss mask.

    gspo     A_i = (R_i - mean R) / std R, s_i = (prod_t rho_it)^(1/|y_i|)
             L = 1/N sum_i -clipped(s_i, A_i), with a far narrower clip range, since s_i moves far less than rho_it
             Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv 2507.18071.

    ppo      A_i = R_i - b, with b the mean of all rewards of the steps before and one response a prompt
             L = 1 / (sum_i |y_i|) sum_i sum_t -clipped(rho_it, A_i)
             Schulman et al. 2017, "Proximal Policy Optimization", arXiv 1707.06347, equation 7, without a critic: the
             setting of arXiv 2610.06647. b is state of the run, `RewardBaseline`.

`std` is the sample standard deviation (divided by G - 1), as in TRL and verl.

    config = ObjectiveConfig(**RECIPES["dapo"], group_size=16)

Left out: the learning rates, batch sizes and sampling that the papers used.
"""

from types import MappingProxyType
from typing import Any, Mapping

RECIPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "grpo": MappingProxyType(
            dict(
                advantage_estimator="group",
                advantage_std_normalization=True,
                clip_range_low=0.2,
                clip_range_high=0.2,
                importance_level="token",
                loss_aggregation="sequence",
                kl_coefficient=0.04,
                kl_estimator="k3",
                group_filter="none",
            )
        ),
        "dr_grpo": MappingProxyType(
            dict(
                advantage_estimator="group",
                advantage_std_normalization=False,
                clip_range_low=0.2,
                clip_range_high=0.2,
                importance_level="token",
                loss_aggregation="group_constant",
                kl_coefficient=0.0,
                group_filter="none",
            )
        ),
        "dapo": MappingProxyType(
            dict(
                advantage_estimator="group",
                advantage_std_normalization=True,
                clip_range_low=0.2,
                clip_range_high=0.28,
                importance_level="token",
                loss_aggregation="token",
                kl_coefficient=0.0,
                group_filter="drop_uniform",
            )
        ),
        "gspo": MappingProxyType(
            dict(
                advantage_estimator="group",
                advantage_std_normalization=True,
                clip_range_low=3e-4,
                clip_range_high=4e-4,
                importance_level="sequence",
                loss_aggregation="sequence",
                kl_coefficient=0.0,
                group_filter="none",
            )
        ),
        "ppo": MappingProxyType(
            dict(
                group_size=1,
                advantage_estimator="running_mean",
                advantage_std_normalization=False,
                clip_range_low=0.2,
                clip_range_high=0.2,
                importance_level="token",
                loss_aggregation="token",
                kl_coefficient=0.0,
                group_filter="none",
            )
        ),
    }
)
"""Recipe name -> values of `ObjectiveConfig` fields. `dr_grpo` needs `loss_constant` besides; `ppo` has its group size."""
