"""Run megatron-core where there is no CUDA device.

Megatron asks `torch.cuda` for its current device, its random state and its streams, and writes `device="cuda"` into a
few constructors. Without a CUDA device this module answers the first kind permanently (`install_cpu_device_layer`) and
the second kind inside a `with cuda_means_cpu():` block, which the training program opens around building, optimizer
and checkpoint calls. The block is not needed around a sweep: nothing there names "cuda", and an omission raises.

Left out: Transformer Engine. With a CUDA device every function here does nothing.
"""

import contextlib

import torch
from torch.overrides import TorchFunctionMode

from longstraw.patches.verify import require_attribute, require_megatron_version, require_source

_CPU = torch.device("cpu")


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrites device="cuda" to "cpu", drops pinning, and lets `Tensor.type()` claim torch.cuda.* as Megatron expects.

    Every call of a torch function inside the block comes through here, so those that name no device go on at once.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _NAME_A_DEVICE:
            return _run_on_the_cpu(func, args, kwargs or {})
        if not kwargs:
            return func(*args)
        if "device" in kwargs or "pin_memory" in kwargs:
            kwargs = _without_cuda(kwargs)
        return func(*args, **kwargs)


_NAME_A_DEVICE = frozenset({torch.Tensor.cuda, torch.Tensor.pin_memory, torch.Tensor.to, torch.Tensor.type})
"""Functions that name a device by themselves or by a positional argument, or are asked for one."""


def _run_on_the_cpu(func, args: tuple, kwargs: dict):
    if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
        return args[0]
    if func is torch.Tensor.type and len(args) == 1 and not kwargs:
        name = func(*args)  # blocks may be nested
        return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)
    if func is torch.Tensor.to:
        args = tuple(_CPU if _is_cuda(a) else a for a in args)
    return func(*args, **_without_cuda(kwargs))


def _without_cuda(kwargs: dict) -> dict:
    """The arguments with the CPU as the device, where that is CUDA, and without pinning."""
    changed = dict(kwargs)
    if _is_cuda(kwargs.get("device")):
        changed["device"] = _CPU
    if kwargs.get("pin_memory"):
        changed["pin_memory"] = False
    return changed


def _is_cuda(device) -> bool:
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


class _HostStream:
    """The one stream of a CPU: everything on it has already happened. Also its own event."""

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        return event or _HostStream()

    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False


def cuda_available() -> bool:
    """Whether tensors live on a CUDA device in this process."""
    return torch.cuda.is_available()


def current_device() -> torch.device:
    """The device that model weights and activations live on: the current CUDA device, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if cuda_available() else _CPU


def cuda_means_cpu() -> contextlib.AbstractContextManager:
    """A block in which Megatron code that names "cuda" gets CPU tensors; empty where a CUDA device exists."""
    return contextlib.nullcontext() if cuda_available() else _CudaMeansCpu()


def install_cpu_device_layer() -> None:
    """Answer Megatron's `torch.cuda` questions on the CPU. Safe to call twice; a no-op with a CUDA device.

    Raises PatchMismatch when a target in megatron-core is not what this was written for.
    """
    require_megatron_version()
    if cuda_available() or getattr(torch.cuda, "_longstraw_cpu", False):
        return
    cuda = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.set_device = lambda device: None
    cuda.device_count = lambda: 1
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.random.get_rng_state, cuda.random.set_rng_state = cuda.get_rng_state, cuda.set_rng_state
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)  # torch.manual_seed asks for every backend
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.empty_cache = lambda: None
    cuda.Stream = cuda.Event = _HostStream
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: _HostStream()
    cuda.stream = lambda stream: stream if stream is not None else _HostStream()
    cuda._longstraw_cpu = True
    _patch_rng_tracker()
    _patch_gated_delta_net()
    _patch_token_dispatcher()


def _patch_rng_tracker() -> None:
    from megatron.core.tensor_parallel import random as megatron_random

    require_source(megatron_random._get_cuda_rng_state, "def _get_cuda_rng_state(", "graph_safe")
    require_source(megatron_random._set_cuda_rng_state, "def _set_cuda_rng_state(", "graph_safe")
    megatron_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


def _patch_gated_delta_net() -> None:
    """GatedDeltaNet refuses to build without flash-linear-attention, of which it needs only `l2norm` on the CPU."""
    from megatron.core.ssm.gated_delta_net import common

    require_attribute(common, "HAVE_FLA")
    require_source(common._GDNBase.__init__, "if not HAVE_FLA")
    require_source(common._GDNBase._prepare_input_for_gated_delta_rule, "l2norm(query_key.contiguous())")
    common.HAVE_FLA = True
    common.l2norm = l2norm


def _patch_token_dispatcher() -> None:
    """The all-to-all of experts wants its split sizes as numpy arrays, which Megatron makes of CUDA tensors only."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    require_attribute(token_dispatcher, "maybe_move_tensor_to_cpu")
    require_source(moe_utils.maybe_move_tensor_to_cpu, "torch.is_tensor(tensor) and tensor.is_cuda", "as_numpy: bool")
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )


def l2norm(x: torch.Tensor, dim: int = -1, eps: float = 1e-6) -> torch.Tensor:
    """x / sqrt(sum(x^2) + eps) along `dim`, computed in float32 at least, in x's dtype (flash-linear-attention's form)."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).sum(dim, keepdim=True) + eps)).to(x.dtype)
