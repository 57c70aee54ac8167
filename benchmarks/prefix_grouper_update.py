"""One GRPO update with PrefixGrouper 0.0.1: the prompt once, every response beside it, one graph over all of them.

PrefixGrouper brings the regrouping of queries, keys and values around attention, registered with transformers under its own
name. What it calls inside is ours to choose: `attend_causal` below, torch's fused kernel with the prompt's part causal and
the responses' part masked at its lower right. Positions and the log-probabilities' head are as its README has them, except
that the head runs on response tokens alone, which favours it.

Left out: prompts of unequal length (padding), layers other than attention, which it has no hook for.

G group, P prompt tokens, R response tokens, D head dim, H hidden.
"""

import torch
from prefix_grouper import PrefixGrouper
from prefix_grouper.utils.register_transformers import register_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from benchmarks.transformers_model import compute_response_logprobs, load_model
from benchmarks.updates import Batch, weighted_loss

ATTENTION = "longstraw_benchmark_causal"


def attend_causal(module, query, key, value, attention_mask, *, scaling=None, **_):
    """Causal attention of the last queries; tensors [B, heads, S, D]. Returns ([B, S, heads, D], None).

    attention_mask: the 0-1 mask [B, S] of padding that PrefixGrouper hands out: all ones here, and not read.
    """
    queries, keys = query.shape[2], key.shape[2]
    mask = None
    if queries != keys:  # responses: they see the prompt and, of themselves, what came before
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2), None


class PrefixGrouperUpdate:
    """Forward and backward of the whole group at once; gradients land in the parameters."""

    def __init__(self, folder, *, checkpointed: bool = False):
        register_attention()
        AttentionInterface.register(ATTENTION, attend_causal)
        self.model = load_model(folder, checkpointed=checkpointed)
        self.model.set_attn_implementation("prefix_grouper_attention")

    def accumulate(self, batch: Batch) -> None:
        """The gradient of the whole group; old log-probabilities are the new ones, detached, as in the conventional run."""
        (group, tokens), prompt = batch.responses.shape, batch.prompt.shape[1]
        grouper = PrefixGrouper.from_ungrouped_masks(
            prefix_mask=torch.ones_like(batch.prompt), suffix_mask=torch.ones_like(batch.responses), group_sizes=group,
            device=batch.prompt.device,
        )
        own = torch.arange(prompt, prompt + tokens, device=batch.prompt.device)
        hidden = self.model.model(
            input_ids=torch.cat([batch.prompt, batch.responses.reshape(1, -1)], 1),
            position_ids=torch.cat([torch.arange(prompt, device=own.device), own.repeat(group)])[None],
            use_cache=False, prefix_grouper=grouper, prefix_grouper_attn_func=ATTENTION,
        ).last_hidden_state
        _, _, responses, _ = grouper.split_output(hidden, include_prefix_last=1)
        logprobs = compute_response_logprobs(self.model, responses[:, :-1], batch.responses)
        weighted_loss(logprobs, logprobs.detach(), batch.advantages, batch.weights).backward()
