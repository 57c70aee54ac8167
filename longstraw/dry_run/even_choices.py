"""Choices that a model makes by its data, made evenly: tokens to experts, and keys by sparse attention.

Tokens go to experts in turn, so that each gets as many: the sizes of every exchange and product follow from that.

Queries select keys as if every earlier key were as likely: of the n that a rank has of N, the top k come to k n / N for a query,
and a list is as wide as the longest of a sub-block's, taken at four standard deviations. On tensors without numbers, scoring a
rank's keys is one operation (`longstraw_dry::scan`) in place of a loop over tiles of them; it counts the products of all heads
with all keys and what the loop reads and writes.

Real choices are never as even: the dry run says nothing of experts that are asked for more than others, or of prompts whose
selected keys lie together. A step that is measured to be compared with a dry run makes its choices so too: its lists are cut or
filled up to the same widths, which trains nothing.
On tensors without numbers the signs of LoGRA's projections are not drawn either.

W gathered queries, S queries, H index heads, E index dim, N keys.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.nn.functional as F

from longstraw.adapters.expert_routing import ReplayRouter
from longstraw.attention import device_kind, selection
from longstraw.dry_run import fused_ops  # noqa: F401  (defines the operation)
from longstraw.dry_run.shapes_only import ShapesOnly
from longstraw.dry_run.tracker import MemoryTracker
from longstraw.optim import projection


@contextmanager
def even_choices(tracker: MemoryTracker) -> Iterator[None]:
    """A block in which models choose evenly, on tensors with or without numbers."""
    shapes = isinstance(tracker, ShapesOnly)

    def scan(best, q, weights, at, keys, positions, geometry):
        tracker.hold_for_a_moment(scan_workspace(q, keys, geometry))
        return torch.ops.longstraw_dry.scan(best, q, weights, keys, geometry.top_k)

    def keep_global(best, geometry):
        width = min(best.shape[2], width_of_list(geometry.top_k, 1 / geometry.layout.ranks))
        if shapes:
            tracker.answers.append(width)
            return keep(best, geometry)
        return _set_width(keep(best, geometry), width, selection.NOTHING)

    def split_rows(best, positions):
        widths = widths_of(best, positions)
        if shapes:
            tracker.answers.extend(widths if any(widths) else [])
            return split(best, positions)
        return tuple(_set_width(rows, width, -1) for rows, width in zip(split(best, positions), widths))

    def mix_counter(key, row, block, **rounds):
        tracker.take_numbers((row, block))  # which signs are drawn decides nothing
        return mix(key, row, block, **rounds)

    keep, split, mix = selection._keep_global, selection._split_rows, projection.mix_counter
    with ExitStack() as stack:
        if shapes:
            stack.enter_context(mock.patch.object(projection, "mix_counter", mix_counter))
        for target, name, function in (
            (selection, "_scan", scan if shapes else selection._scan), (selection, "_keep_global", keep_global),
            (selection, "_split_rows", split_rows), (ReplayRouter, "routing", _route_in_turn(ReplayRouter.routing)),
        ):
            stack.enter_context(mock.patch.object(target, name, function))
        yield


def _set_width(lists: torch.Tensor, width: int, value: int) -> torch.Tensor:
    missing = width - lists.shape[-1]
    return lists[..., :width].contiguous() if missing <= 0 else F.pad(lists, (0, missing), value=value)


def _route_in_turn(routing):
    def route(router: ReplayRouter, logits: torch.Tensor, padding_mask=None):
        gates, chosen = routing(router, logits, padding_mask)
        turns = torch.arange(router.run.tokens * router.topk, device=logits.device) % router.config.num_moe_experts
        even = torch.zeros(chosen.shape, dtype=torch.bool, device=logits.device)
        even[: router.run.tokens].scatter_(1, turns.view(-1, router.topk), True)
        return gates, even

    return route


def scan_workspace(q: torch.Tensor, keys: torch.Tensor, geometry) -> int:
    """Bytes that a step of the loop needs: products of every head, scores, and packed keys that are joined and sorted.

    q [S, H, E], keys [N, E].
    """
    on_cuda, step = device_kind.computes_on_cuda(q), geometry.keys_at_once
    tile = min(step, len(keys), step if on_cuda else selection._CPU_TILE)
    queries = min(len(q), max(1, (2**24 if on_cuda else 2**19) // (q.shape[1] * tile)))
    return queries * (4 * q.shape[1] * tile + 8 * tile + 3 * 8 * (tile + geometry.top_k))


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
