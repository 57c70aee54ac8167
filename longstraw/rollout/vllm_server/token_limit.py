"""Keeps vLLM from sampling ids that no token has: a model may have more rows than its tokenizer has tokens.

A logits processor that vLLM's workers load by name. A request that has `extra_args={"num_tokens": N}` never samples an
id of N or above; the others' probabilities are those of the rest, renormalised.
"""

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class TokenLimit(AdapterLogitsProcessor):
    """See the module."""

    @classmethod
    def validate_params(cls, params) -> None:
        """Raise ValueError for a limit that leaves nothing."""
        limit = (params.extra_args or {}).get("num_tokens")
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise ValueError(f"num_tokens must be at least 1, got {limit}.")

    def is_argmax_invariant(self) -> bool:
        """An id beyond the limit could be the likeliest."""
        return False

    def new_req_logits_processor(self, params):
        """What is done to the logits [V] of one request before each token; None for nothing."""
        limit = (params.extra_args or {}).get("num_tokens")
        if limit is None:
            return None

        def forbid(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            logits[limit:] = -torch.inf
            return logits

        return forbid
