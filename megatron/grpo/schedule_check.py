"""Whether a checkpoint's schedule of learning rate and weight decay is this run's, and whose counts where they differ.

A run resumed with other rates or another length is what one often wants, and sometimes an oversight. What has no effect
(the length of a constant schedule) may differ; anything else needs one of Megatron's two flags that say whose counts.
"""

from collections.abc import Mapping

_FLAGS = {
    "max_lr": "--lr", "min_lr": "--min-lr", "lr_warmup_steps": "--lr-warmup-iters", "lr_decay_steps": "--lr-decay-iters",
    "lr_decay_style": "--lr-decay-style", "start_wd": "--start-weight-decay", "end_wd": "--weight-decay",
    "wd_incr_steps": "--train-iters", "wd_incr_style": "--weight-decay-incr-style",
}
"""Field of Megatron's scheduler -> the flag that sets it."""


def compare_schedules(path, saved: Mapping, own: Mapping) -> str | None:
    """One sentence that names the flags in which two schedules differ, None where they have the same effect.

    path: of the checkpoint, for the sentence. saved, own: state dicts of Megatron's OptimizerParamScheduler.
    """
    ignored = set()
    if saved["lr_decay_style"] == own["lr_decay_style"] == "constant":
        ignored |= {"lr_decay_steps", "min_lr"}
    if saved["wd_incr_style"] == own["wd_incr_style"] == "constant":
        ignored |= {"wd_incr_steps", "start_wd"}
    different = [
        f"{flag} {saved[name]} (now {own[name]})"
        for name, flag in _FLAGS.items()
        if name not in ignored and saved[name] != own[name]
    ]
    if not different:
        return None
    return (
        f"the checkpoint {path} was saved with {', '.join(different)}: pass --override-opt-param-scheduler to go on with "
        "this run's or --use-checkpoint-opt-param-scheduler to keep the checkpoint's"
    )
