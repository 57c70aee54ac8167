"""Relative errors by the overall norm, and the ratio of two implementations' errors against a float64 oracle."""

from collections.abc import Sequence

import torch


def relative_error(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """|found - expected| / |expected| over all tensors together, computed in float64."""
    error = sum((f.double() - e.double()).square().sum().item() for f, e in zip(found, expected, strict=True))
    norm = sum(e.double().square().sum().item() for e in expected)
    return (error / norm) ** 0.5 if norm else float(error > 0)


def error_ratio(
    found: Sequence[torch.Tensor], plain: Sequence[torch.Tensor], oracle: Sequence[torch.Tensor]
) -> float:
    """Mean over the tensors of error(found) / error(plain), each tensor by its norm."""
    ratios = []
    for f, p, o in zip(found, plain, oracle, strict=True):
        plain_error = relative_error([p], [o])
        ratios.append(relative_error([f], [o]) / max(plain_error, torch.finfo(f.dtype).eps / 8))
    return sum(ratios) / len(ratios)
