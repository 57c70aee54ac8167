"""bfloat16 and a 16-bit remainder are the float32 weight, bit for bit."""

import pytest
import torch

from longstraw.optim.masters import join_float32, split_float32


def from_bits(bits):
    bits = torch.as_tensor(bits, dtype=torch.int64)
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


# Every upper half, with lower halves around both of its ends and the half-way value.
LOWER = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xABCD, 0xFFFF])
ALL_BITS = ((torch.arange(65536) << 16)[:, None] + LOWER).flatten()


def test_every_pattern_comes_back():
    full = from_bits(ALL_BITS)
    assert torch.equal(join_float32(*split_float32(full)).view(torch.int32), full.view(torch.int32))


def test_the_weight_is_the_nearest_bfloat16():
    full = from_bits(ALL_BITS)
    full = full[full.isfinite()]
    weight, remainder = split_float32(full)
    cast = full.to(torch.bfloat16)
    half_way = remainder == -(2**15)
    assert torch.equal(weight[~half_way], cast[~half_way])
    finite = half_way & weight.isfinite()
    distance = (weight.double() - full.double()).abs()
    assert torch.equal(distance[finite], (cast.double() - full.double()).abs()[finite])
    assert bool((weight.double().abs() > full.double().abs())[finite].all())  # away from zero


def test_infinities_and_nan_stay():
    full = torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan, 0.0, -0.0])
    weight, remainder = split_float32(full)
    assert torch.equal(weight.float(), full) or weight.float().isnan().tolist() == full.isnan().tolist()
    assert weight[:2].tolist() == [torch.inf, -torch.inf] and weight[2:4].isnan().all() and remainder.eq(0).all()


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (5, 7)])
def test_shapes_and_strides(shape):
    full = torch.randn(shape[1], shape[0], generator=torch.Generator().manual_seed(0)).t()
    weight, remainder = split_float32(full)
    assert weight.shape == remainder.shape == shape
    assert weight.dtype == torch.bfloat16 and remainder.dtype == torch.int16
    assert torch.equal(join_float32(weight, remainder), full)
    assert torch.equal(join_float32(weight[:, ::2], remainder[:, ::2]), full[:, ::2])


def test_refuses_other_dtypes():
    with pytest.raises(ValueError, match="Only float32 splits"):
        split_float32(torch.zeros(3, dtype=torch.float64))
    for weight, remainder in (
        (torch.zeros(3), torch.zeros(3, dtype=torch.int16)),
        (torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int32)),
        (torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int16)),
    ):
        with pytest.raises(ValueError, match="joined from bfloat16 and int16 of one shape"):
            join_float32(weight, remainder)
