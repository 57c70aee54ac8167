"""What samples must be before anyone trains on them, whoever sampled them.

A sample that is not what was asked for trains on something else in silence: so each is held to its request, and the first
that does not fit is named. Left out: whether the weights were the right ones beyond their version's number
(`megatron.grpo.weight_lineage`).
"""

import math
from collections.abc import Sequence

from longstraw.rollout.protocol import Sample
from longstraw.rollout.routes import RouteShape, check_routes


def check_samples(
    samples: Sequence[Sample], *, group_size: int, weight_version: int, max_response_length: int,
    stop_ids: frozenset[int], num_tokens: int, routes: RouteShape | None = None,
) -> str:
    """One sentence about the first sample of a group that is not one of what was asked for; "" where all are.

    stop_ids: end a response, and stand nowhere before its end. num_tokens: ids are below it. routes: what the model's
    look like, where they are needed.
    """
    if len(samples) != group_size:
        return f"{len(samples)} responses came back where {group_size} were asked for"
    for place, sample in enumerate(samples):
        problem = _check_sample(sample, weight_version, max_response_length, stop_ids, num_tokens)
        problem = problem or (check_routes(sample, routes) if routes is not None else "")
        if problem:
            return f"response {place} {problem}"
    return ""


def _check_sample(sample: Sample, version: int, longest: int, stop_ids: frozenset[int], num_tokens: int) -> str:
    ids, length = sample.token_ids, len(sample.token_ids)
    if sample.weight_version != version:
        return f"was sampled by weights of version {sample.weight_version}, and version {version} is needed"
    if not 1 <= length <= longest:
        return f"has {length} tokens, not 1 to {longest} (--max-response-length)"
    outside = next((token for token in ids if not 0 <= token < num_tokens), None)
    if outside is not None:
        return f"holds token {outside}, outside the tokenizer's {num_tokens}"
    if len(sample.logprobs) != length:
        return f"has {length} tokens and {len(sample.logprobs)} log-probabilities"
    bad = next((value for value in sample.logprobs if not (math.isfinite(value) and value <= _ROUNDING)), None)
    if bad is not None:
        return f"has {bad} as a token's log-probability"
    if any(token in stop_ids for token in ids[:-1]):
        return "goes on behind a stop token"
    if (ids[-1] in stop_ids) != (sample.finish_reason == "stop"):
        return f"ends with token {ids[-1]} and is said to have ended by {sample.finish_reason}"
    if sample.finish_reason == "length" and length < longest:
        return (
            f"was cut after {length} tokens, short of --max-response-length {longest}: the engine's --max-model-len must hold the "
            "longest prompt and that many tokens more"
        )
    return ""


_ROUNDING = 1e-3
"""How far above 0 an engine's log-probability may lie: a softmax in 16 bits is not exact."""
