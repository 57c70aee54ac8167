"""Operations that stand for a GPU's kernels: their results and gradients have the forms of those of the engine's CPU code."""

import pytest
import torch
import torch.nn.functional as F

from longstraw.attention import delta_rule
from longstraw.dry_run import fused_ops
from longstraw.dry_run.shapes_only import ShapesOnly
from longstraw.patches.device import l2norm

held: list[int] = []

CASES = {
    "delta rule": (
        lambda q, k, v, g, beta, state: fused_ops.fused_delta_rule(held.append)(q, k, v, g=g, beta=beta, initial_state=state),
        delta_rule.chunked_delta_rule,
        [(2, 70, 3, 8), (2, 70, 3, 8), (2, 70, 3, 16), (2, 70, 3), (2, 70, 3), (2, 3, 8, 16)],
    ),
    "l2norm": (fused_ops.fused_l2norm, l2norm, [(2, 5, 3, 8)]),
    "rms norm": (
        lambda x, w: fused_ops.fused_rms_norm(x, w.shape, w, 1e-6), lambda x, w: F.rms_norm(x, w.shape, w, 1e-6), [(4, 6), (6,)]
    ),
}


def find_forms(function, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[tuple]:
    """(shape, dtype) of outputs and gradients; a state stays float32."""
    with ShapesOnly():
        leaves = [torch.empty(s, dtype=torch.float32 if len(shapes) > 5 and s == shapes[-1] else dtype) for s in shapes]
        outputs = function(*(leaf.requires_grad_() for leaf in leaves))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        grads = torch.autograd.grad(outputs, leaves, [torch.empty_like(o) for o in outputs])
        return [(tuple(t.shape), t.dtype) for t in (*outputs, *grads)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_forms_are_those_of_the_engine(case, dtype):
    fused, own, shapes = CASES[case]
    assert find_forms(fused, shapes, dtype) == find_forms(own, shapes, dtype)


def test_one_operation_saves_what_the_kernel_saves():
    fused, _, shapes = CASES["delta rule"]
    with ShapesOnly() as tracker:
        leaves = [torch.empty(s).requires_grad_() for s in shapes]
        before = tracker.live_bytes
        o, end = fused(*leaves)
        decays, inverses = 2 * 70 * 3, 2 * 70 * 3 * fused_ops.CHUNK
        assert tracker.live_bytes - before == 4 * (o.numel() + end.numel() + decays + inverses)


def test_a_kernel_says_what_it_needs_while_it_runs():
    held.clear()
    fused, _, shapes = CASES["delta rule"]
    find_forms(fused, shapes, torch.float32)
    k, v, state = (torch.zeros(shapes[i]) for i in (1, 2, 5))
    assert held == [fused_ops.fwd_workspace(k, v, state), fused_ops.bwd_workspace(k, v, state)]
    assert held[1] > held[0] > 2 * 4 * state.numel(), "two chunks of 64 tokens hold a state each"
