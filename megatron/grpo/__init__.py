"""The training program: GRPO on long shared prompts, on top of Megatron's own parser, models and checkpoints.

`prompts`, `prompt_order`, `rewards` and their neighbours import without torch and without Megatron, so that a
data check or a reward worker starts in a fraction of a second.
"""
