"""LongStraw: exact reinforcement learning on prompts longer than a live autograd graph can hold.

The packages, and who may import whom (tests/unit/layout holds this):

    tools, examples -> megatron.grpo -> longstraw.{transaction, rollout, receipts}
                    -> longstraw.{sweeps, adapters, patches}
                    -> longstraw.{prompt_state, attention, objectives, optim, segments} -> torch

Importing this package imports nothing else: torch and megatron-core come in with the parts that use them.
"""

__version__ = "0.1.0"
