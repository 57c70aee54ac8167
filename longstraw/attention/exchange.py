"""The collectives of paged attention: gather a block's queries, scatter and merge the partial results.

Every function is called by every rank of the layout's group, with equal shapes, whatever a rank owns. Gathered rows
come in slot order, that is in the order of positions.

B batch, H heads, R rows a rank, W = ranks x R, D head dim.
"""

import torch
import torch.distributed as dist

from longstraw.attention.layout import BlockLayout
from longstraw.memory_scopes import memory_scope


@memory_scope("buffers")
def gather_rows(x: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """x [B, H, R, D] of every rank -> [B, H, W, D], contiguous, slot after slot."""
    if layout.ranks == 1:
        return x.contiguous()
    mine = x.movedim(2, 0).contiguous()
    out = mine.new_empty(layout.ranks, *mine.shape)
    dist.all_gather_into_tensor(out.flatten(0, 1), mine, group=layout.group)
    return out.roll(-layout.rotation, 0).flatten(0, 1).movedim(0, 2).contiguous()


@memory_scope("buffers")
def scatter_rows(x: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """Partial results x [B, H, W, D] -> [ranks, B, H, R, D]: what each rank computed for this rank's rows."""
    if layout.ranks == 1:
        return x[None]
    by_slot = x.movedim(2, 0).unflatten(0, (layout.ranks, -1))
    by_rank = by_slot.roll(layout.rotation, 0).contiguous()
    out = torch.empty_like(by_rank)
    dist.all_to_all_single(out, by_rank, group=layout.group)
    return out.movedim(1, 3)


def merge_partials(o: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partial outputs o [P, B, H, R, D] with their log-sum-exps lse [P, B, H, R] over P.

    o_total = sum_p exp(lse_p - lse_total) o_p: what one softmax over all the keys would give. A partial that saw no key
    has lse -inf and weight 0.
    """
    total = lse.logsumexp(0)
    return (o * (lse - total).exp()[..., None]).sum(0), total


def merge_into(o: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merge a partial result into the running o [B, H, R, D] and lse [B, H, R], in place.

    Either may have seen no key (lse -inf, o finite), also both.
    """
    new = torch.logaddexp(lse, part_lse)
    base = new.masked_fill(new == -torch.inf, 0.0)
    o.mul_((lse - base).exp()[..., None]).add_(part * (part_lse - base).exp()[..., None])
    lse.copy_(new)


def gather_tokens(x: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """Values of this rank's tokens [B, mine] -> those of the whole block [B, C], on every rank. Not differentiable."""
    padded = torch.nn.functional.pad(x.detach(), (0, layout.rows - x.shape[1]))
    return gather_rows(padded[:, None, :, None], layout)[:, 0, : layout.length, 0]
