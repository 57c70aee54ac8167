"""Tensors without numbers: what is computed, what is not, and what a program may ask."""

import pytest
import torch
import torch.nn.functional as F

from longstraw.dry_run.forms import UnknownValue
from longstraw.dry_run.shapes_only import ORDINARY, ShapesOnly

GB = 10**9


@pytest.fixture
def tracker():
    with ShapesOnly() as tracker:
        yield tracker


def unknown(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def test_a_step_on_a_terabyte_takes_no_memory(tracker):
    weight = unknown(500_000, 500_000, dtype=torch.bfloat16).requires_grad_()
    x = unknown(1000, 500_000, dtype=torch.bfloat16)
    with tracker.phase("work", "chunk_graph"):
        loss = F.gelu(F.linear(x, weight)).float().square().mean()
        loss.backward()
    assert weight.grad.shape == weight.shape and weight.grad.dtype == torch.bfloat16
    assert tracker.phases["work"]["device"].bytes > 1000 * GB


def test_what_follows_from_known_numbers_is_computed(tracker):
    lengths = torch.tensor([3, 5, 2])
    mask = torch.arange(6)[:, None] < lengths
    assert int(mask.sum()) == 10 and lengths.tolist() == [3, 5, 2] and bool((lengths > 1).all())
    assert torch.full((4,), 2.5).sum().item() == 10.0


def test_what_follows_from_unknown_numbers_is_not(tracker):
    x = unknown(8)
    total = torch.zeros(())
    assert tracker.holds_numbers(total)
    total += x.sum()
    assert not tracker.holds_numbers(total) and not tracker.holds_numbers(x[2:] * 2)


def test_an_ordinary_answer_to_every_question_but_an_integer(tracker):
    x = unknown(3)
    assert bool(torch.isfinite(x).all()) and x.sum().item() == ORDINARY
    assert x.tolist() == [ORDINARY] * 3 and torch.tensor([[x[0], x[1]]]).tolist() == [[pytest.approx(ORDINARY)] * 2]
    count = (x > 0).sum()
    assert int(count) == 0, "between blocks it counts faults"
    tracker.counts_faults = False
    with pytest.raises(UnknownValue, match="integer"):
        int(count)


def test_a_known_mask_picks_and_an_unknown_one_raises(tracker):
    x, known = unknown(5, 4), torch.tensor([True, False, True, True, False])
    assert x[known].shape == (3, 4)
    with pytest.raises(UnknownValue, match="mask"):
        x[x > 0]
    with pytest.raises(UnknownValue, match="shape depends"):
        torch.unique(x)


def test_views_share_memory_and_writes_are_in_place(tracker):
    before = tracker.live_bytes
    x = unknown(1000)
    view = x.view(10, 100).t()[3:]
    view.mul_(2.0)
    assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert tracker.live_bytes - before == 4000
    out = torch.mm(view.t(), unknown(97, 2), out=unknown(10, 2))
    assert out.shape == (10, 2) and tracker.live_bytes - before == 4000 + 80


def test_math_attention_is_not_costed(tracker):
    q = unknown(1, 2, 8, 4)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        with pytest.raises(UnknownValue, match="no run at length"):
            F.scaled_dot_product_attention(q, q, q)


def test_one_form_for_each_signature(tracker):
    x, y = unknown(4, 5), unknown(4, 5)
    x + y
    found = tracker.forms.found
    y + x
    assert tracker.forms.found == found
    y + x.t().contiguous().t()  # other strides
    y + 1
    y + 1.0
    assert tracker.forms.found == found + 4, "a clone, and three sums"


def test_strides_and_dtypes_are_the_operations_own(tracker):
    x = unknown(3, 4, 5, dtype=torch.bfloat16).permute(2, 0, 1)
    kept = x * 2
    assert kept.stride() == x.stride() and (kept @ unknown(4, 2, dtype=torch.bfloat16)).dtype == torch.bfloat16
    values, indices = x.topk(2, -1)
    assert values.shape == indices.shape == (5, 3, 2) and indices.dtype == torch.int64
