"""A GPU's fused kernels as one operation each, for a step on tensors that are on no device.

With `gpu_kernels()` open the engine takes the ways that it takes on a GPU: attention is aten's flash kernel, a root mean square
norm is aten's fused one, products of 16-bit matrices stay 16-bit, and the gated delta rule and the norm of its keys are
flash-linear-attention's kernels. For what aten has no operation of on a CPU there is one here (`fused_ops`). So neither
attention by matrix products nor a loop over a delta rule's chunks is ever counted; a way to one of them that is left raises.
Only a probe's forward-mode derivatives walk over chunks, as they do on a GPU: the first two run and stand for all.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

import torch

import longstraw.adapters.registry  # noqa: F401  (so that what it holds of the functions below can be found)
from longstraw.attention import delta_rule, device_kind, kernels
from longstraw.attention.dual import has_tangent
from longstraw.dry_run.forms import UnknownValue
from longstraw.dry_run.fused_ops import fused_rms_norm
from longstraw.dry_run.tracker import MemoryTracker
from longstraw.memory_scopes import current_scope
from longstraw.prompt_state import residency


def _refuse(name: str):
    def refused(*args, **kwargs):
        raise UnknownValue(f"the step reaches {name}, which a GPU would not: it is not costed")

    return refused


def _refuse_chunks(*args, **kwargs):
    if has_tangent(*args[:6]):
        return delta_rule.chunked_delta_rule(*args, **kwargs)
    raise UnknownValue("the step reaches a loop over the chunks of the delta rule, which a GPU would not: it is not costed")


_NOT_ON_A_GPU = {
    "a loop over the tokens of the delta rule": delta_rule.naive_delta_rule,
    "attention by matrix products": kernels._plain_fwd,
    "the backward of attention by matrix products": kernels._plain_bwd,
}


def _pass_state_sampled(tracker: MemoryTracker):
    """Stands for `delta_rule._pass_state`: two chunks run, and the others leave what these leave."""
    pass_state = delta_rule._pass_state

    def sampled(*args):
        chunks, counter = len(args[0]), tracker.counter
        if chunks <= 2:
            return pass_state(*args)
        with nullcontext() if counter is None else counter.standing_for(chunks / 2):
            two, state = pass_state(*(t[:2] for t in args[:-1]), args[-1])
        tracker.counter = None  # what the others leave has been counted
        try:
            return torch.stack([two[n % 2].clone() for n in range(chunks)]), state
        finally:
            tracker.counter = counter

    return sampled


@contextmanager
def gpu_kernels(tracker: MemoryTracker) -> Iterator[None]:
    """A block in which the engine computes as on a GPU. The model's builder is told elsewhere (`megatron.grpo.dry_run`).

    tracker: is told of what moves between device and host.
    """

    def copy_across(tensor, device):
        counter, tracker.counter = tracker.counter, None  # counted as a copy, not as reading and writing memory
        try:
            copy = tensor.clone()
        finally:
            tracker.counter = counter
        if counter is not None:
            counter.see_copy(copy.nbytes, out=current_scope()[1] == "host")
        return copy

    with ExitStack() as stack:
        swap = stack.enter_context
        swap(mock.patch.object(device_kind, "computes_on_cuda", lambda tensor: True))
        swap(mock.patch.object(residency, "copy_across", copy_across))
        swap(mock.patch.object(torch.nn.functional, "rms_norm", fused_rms_norm))
        swap(mock.patch.object(delta_rule, "_pass_state", _pass_state_sampled(tracker)))
        for module in _holders(delta_rule.chunked_delta_rule):
            if module is not delta_rule:
                swap(mock.patch.object(module, "chunked_delta_rule", _refuse_chunks))
        for name, function in _NOT_ON_A_GPU.items():
            for module in _holders(function):
                swap(mock.patch.object(module, function.__name__, _refuse(name)))
        yield


def _holders(function) -> list:
    """The modules of this project, but this one, that have a function under its own name."""
    return [
        module for name, module in list(sys.modules.items())
        if name.startswith("longstraw.") and not name.startswith("longstraw.dry_run")
        and vars(module).get(function.__name__) is function
    ]
