"""float32 weights kept as the bfloat16 weight that the model computes with and a 16-bit remainder.

An update of ratio 6e-5 changes a bfloat16 weight, whose neighbours lie 2^-8 apart, almost never. The remainder holds
what the bfloat16 lacks: together they are the float32 weight, bit for bit, at two bytes a weight instead of the four of
a float32 copy.

    float32 bits = (bfloat16 bits << 16) + remainder,      -2^15 <= remainder < 2^15

The bfloat16 is the nearest one, as an ordinary cast gives; exactly half-way values go away from zero, where a cast goes
to the even neighbour: only so does the remainder fit 16 bits.

Infinities and the NaN that arithmetic gives stay what they are. A NaN with other payload bits (from 0x7fff8000) would
roll over into a number: updates are checked for finiteness before they get here.
"""

import torch


def split_float32(full: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 -> (nearest bfloat16, int16 remainder), of the same shape.

    Raises:
        ValueError: full is not float32.
    """
    if full.dtype != torch.float32:
        raise ValueError(f"Only float32 splits into bfloat16 and a remainder, got {full.dtype}.")
    bits = full.contiguous().view(torch.int32).to(torch.int64)
    high = (bits + 0x8000) >> 16
    remainder = bits - (high << 16)
    # The largest positive bits round up to 2^15, which a signed word spells -2^15 (the NaNs of the module's text).
    high = torch.where(high >= 0x8000, high - 0x10000, high)
    return high.to(torch.int16).view(torch.bfloat16), remainder.to(torch.int16)


def join_float32(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The float32 that `split_float32` was given, bit for bit.

    Raises:
        ValueError: the dtypes are not bfloat16 and int16, or the shapes differ.
    """
    if weight.dtype != torch.bfloat16 or remainder.dtype != torch.int16 or weight.shape != remainder.shape:
        raise ValueError(
            f"A float32 weight is joined from bfloat16 and int16 of one shape, got {weight.dtype} {list(weight.shape)} "
            f"and {remainder.dtype} {list(remainder.shape)}."
        )
    high = weight.contiguous().view(torch.int16).to(torch.int32)
    return ((high << 16) + remainder.to(torch.int32)).view(torch.float32)
