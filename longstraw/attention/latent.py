"""Multi-latent attention with absorbed queries: over selected rows (`sparse`) or over all of them (`paged`).

Where every key is selected the mask does nothing: the dense path is the same attention without scores or selection. It
is paged attention with one key head whose key and value are the same latent row; what the columns after the first V give
as a value is dropped.

B batch, H query heads, R rows a rank, M own tokens, N pages' rows, D latent key width, V value width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from longstraw.attention.geometry import AttentionGeometry
from longstraw.attention.paged import attend, paged_attention
from longstraw.attention.selection import Selection
from longstraw.attention.sparse import LatentGeometry, LatentPages, attend_sparse, sparse_attention


@dataclass(frozen=True)
class KeysAndValues:
    """Latent pages as keys and values of one head (`longstraw.attention.geometry.Pages`)."""

    pages: LatentPages

    @property
    def rows(self) -> int:
        """Rows of this rank."""
        return self.pages.rows

    @property
    def rows_of_ranks(self) -> tuple[int, ...]:
        """Rows of every rank."""
        return self.pages.rows_of_ranks

    @property
    def batch(self) -> int:
        """1, or the batch of the blocks that wrote the pages."""
        return self.pages.batch

    @property
    def constant(self) -> bool:
        """Whether the adjoints are left alone."""
        return self.pages.constant

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The latents [B or 1, 1, N, D], twice."""
        latents = self.pages.read()[:, None]
        return latents, latents

    def add_adjoint(self, dk: torch.Tensor, dv: torch.Tensor, start: int = 0) -> None:
        """Both gradients are the latents'."""
        with self.pages.adjoint() as adjoint:
            if adjoint is not None:
                adjoint[:, start : start + dk.shape[2]] += (dk + dv)[:, 0]


def _dense(geometry: LatentGeometry) -> AttentionGeometry:
    pages = tuple(map(KeysAndValues, geometry.history))
    return AttentionGeometry(geometry.layout, geometry.scale, geometry.rows_at_once, pages, geometry.exchange)


def attend_latents(
    q: torch.Tensor, latents: torch.Tensor, selection: Selection | None, geometry: LatentGeometry
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, H, R, D], own latents [B, M, D] -> output [B, H, R, V], log-sum-exp [B, H, R]; selection None: all keys.

    Not differentiable: `latent_attention` is.
    """
    if selection is not None:
        return attend_sparse(q, latents, selection, geometry)
    o, lse = attend(q, latents[:, None], latents[:, None], _dense(geometry))
    return o[..., : geometry.value_dim].contiguous(), lse


def latent_attention(
    q: torch.Tensor, latents: torch.Tensor, selection: Selection | None, geometry: LatentGeometry,
    kept: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Differentiable attention of a block: q [B, H, R, D], own latents [B, M, D] -> [B, H, R, V].

    selection None: all keys. kept: what `attend_latents` gave for the same block; with it the forward computes nothing.
    """
    if selection is not None:
        return sparse_attention(q, latents, selection, geometry, kept)
    if kept is not None:  # the columns that were dropped have no gradient
        kept = (F.pad(kept[0], (0, q.shape[-1] - geometry.value_dim)), kept[1])
    keys = latents[:, None]
    return paged_attention(q, keys, keys, _dense(geometry), kept)[..., : geometry.value_dim]
