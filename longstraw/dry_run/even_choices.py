"""Choices that a model makes by its data, made evenly: tokens to experts, and keys by sparse attention.

Tokens go to experts in turn, so that each gets as many: the sizes of every exchange and product follow from that.

Queries select keys as if every earlier key were as likely: of the n that a rank has of N, the top k come to k n / N for a query,
and a list is as wide as the longest of a sub-block's, taken at four standard deviations. Scoring a rank's keys is one
operation (`longstraw_dry::scan`) in place of a loop over tiles of them; it counts the products of all heads with all keys and
what the loop reads and writes.

Real choices are never as even: the dry run says nothing of experts that are asked for more than others, or of prompts whose
selected keys lie together.

W gathered queries, S queries, H index heads, E index dim, N keys.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from longstraw.adapters.expert_routing import ReplayRouter
from longstraw.attention import selection
from longstraw.dry_run import fused_ops  # noqa: F401  (defines the operation)
from longstraw.dry_run.shapes_only import ShapesOnly

PRODUCTS_AT_ONCE = 2**24
"""(query, head, key) products of one step of the loop, as `longstraw.attention.selection` bounds them on an accelerator."""


@contextmanager
def even_choices(tracker: ShapesOnly) -> Iterator[None]:
    """A block in which models choose evenly."""

    def scan(best, q, weights, at, keys, positions, geometry):
        products = q.shape[0] * q.shape[1] * min(len(keys), geometry.keys_at_once)
        # float32, by head: the products and what clipping and weighting makes of them
        tracker.hold_for_a_moment(3 * 4 * min(products, PRODUCTS_AT_ONCE))
        return torch.ops.longstraw_dry.scan(best, q, weights, keys, geometry.top_k)

    def keep_global(best, geometry):
        tracker.answers.append(min(best.shape[2], width_of_list(geometry.top_k, 1 / geometry.layout.ranks)))
        return original_keep(best, geometry)

    def split_rows(best, positions):
        widths = widths_of(best, positions)
        tracker.answers.extend(widths if any(widths) else [])
        return original_split(best, positions)

    original_keep, original_split = selection._keep_global, selection._split_rows
    with ExitStack() as stack:
        for target, name, function in (
            (selection, "_scan", scan), (selection, "_keep_global", keep_global), (selection, "_split_rows", split_rows),
            (ReplayRouter, "routing", _route_in_turn(ReplayRouter.routing)),
        ):
            stack.enter_context(mock.patch.object(target, name, function))
        yield


def _route_in_turn(routing):
    def route(router: ReplayRouter, logits: torch.Tensor, padding_mask=None):
        gates, chosen = routing(router, logits, padding_mask)
        turns = torch.arange(router.run.tokens * router.topk) % router.config.num_moe_experts
        even = torch.zeros(chosen.shape, dtype=torch.bool)
        even[: router.run.tokens].scatter_(1, turns.view(-1, router.topk), True)
        return gates, even

    return route


def width_of_list(top_k: int, share: float) -> int:
    """The longest of many lists that each hold a part of top k keys, whose mean is a share of them."""
    mean = top_k * share
    return min(top_k, math.ceil(mean + 4 * math.sqrt(mean * (1 - share))))


def widths_of(best: torch.Tensor, positions: Sequence[torch.Tensor | None]) -> list[int]:
    """Columns that the lists [B, W, L] come to in each source of keys; 0 of a source without any."""
    counts = [0 if source is None else len(source) for source in positions]
    total, length = sum(counts), best.shape[2]
    return [
        min(count, length, width_of_list(length, count / total)) if count and best.numel() else 0 for count in counts
    ]
