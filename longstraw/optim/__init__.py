"""Updates of all weights from gradient sketches (LoGRA, arXiv 2610.06647), with a step size from a predicted KL.

Pure functions over tensors, and one accumulator a weight. Nothing here knows Megatron, sweeps or prompt state.
"""

from longstraw.optim.config import LograConfig
from longstraw.optim.masters import join_float32, split_float32
from longstraw.optim.projection import Projection, project_columns
from longstraw.optim.row_adam import row_scales, row_squares, update_row_moment
from longstraw.optim.sketch import (
    BlockLimits,
    WeightSketch,
    add_to_sketch,
    all_reduce_sketches,
    open_sketch,
    perturbed_linear,
    sketched_linear,
)
from longstraw.optim.step_control import (
    StepControlError,
    choose_alpha,
    kl_rate,
    predicted_kl,
    rate_from_kl,
    ratio_step,
    scheduled_budget,
    subtract_mismatch,
    sum_kl,
    sum_logit_variance,
    update_mismatch,
)
from longstraw.optim.update import apply_update, projection_gram, sketch_cosine, update_square_norm

__all__ = [
    "BlockLimits",
    "LograConfig",
    "Projection",
    "StepControlError",
    "WeightSketch",
    "add_to_sketch",
    "all_reduce_sketches",
    "apply_update",
    "choose_alpha",
    "join_float32",
    "kl_rate",
    "open_sketch",
    "perturbed_linear",
    "predicted_kl",
    "project_columns",
    "projection_gram",
    "rate_from_kl",
    "ratio_step",
    "row_scales",
    "row_squares",
    "scheduled_budget",
    "sketch_cosine",
    "sketched_linear",
    "split_float32",
    "subtract_mismatch",
    "sum_kl",
    "sum_logit_variance",
    "update_mismatch",
    "update_row_moment",
    "update_square_norm",
]
