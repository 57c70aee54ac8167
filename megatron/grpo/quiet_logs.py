"""Keep Megatron's start-up chatter out of a run's output: its warnings stay, its listings go."""

import logging

_EXPECTED = (
    "GPTModel IS DEPRECATED",  # both model classes exist in the pinned version; see MEGATRON notes in the design
    "MCore's async save is deprecated",  # the writer is pinned with the version; saves here are synchronous
    "CPU RNG state changed within GPU RNG context",  # without a GPU the two are one and the same state
)


class _DropExpected(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not any(text in record.getMessage() for text in _EXPECTED)


def quiet_logs() -> None:
    """Show Megatron's warnings and errors only, without those that are always expected here."""
    for name in ("megatron.core", "megatron.core.distributed.param_and_grad_buffer", "megatron.core.optimizer"):
        logging.getLogger(name).setLevel(logging.WARNING)
    keep = _DropExpected()
    for name in (
        "megatron.core.models.gpt.gpt_model", "megatron.core.tensor_parallel.random",
        "megatron.core.dist_checkpointing.strategies.torch",
    ):
        logging.getLogger(name).addFilter(keep)
