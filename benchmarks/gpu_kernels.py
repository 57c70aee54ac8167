"""Attention and the gated delta rule against the roofline of the device: what a step's time stands on.

Shapes are one layer of Qwen3.6-27B: a chunk of queries over the pages of a long prompt, and a chunk of the delta rule. The
roofline of a kernel is the longer of its operations over the device's rate and its bytes, each read or written once, over the
device's bandwidth (`longstraw.dry_run.hardware`); `roofline_fraction` is that over the seconds taken. A device that the
table does not have gives seconds and rates alone.

Left out: kernels under context parallelism.

H query heads, G key heads, S queries, N keys, D head dim; T tokens, K and V head dims of the delta rule, C its chunk.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from longstraw.attention.delta_rule import chunked_delta_rule
from longstraw.attention.kernels import attend_bwd, attend_fwd
from longstraw.dry_run.hardware import HARDWARE, Hardware

DELTA_CHUNK = 64


@dataclass(frozen=True, kw_only=True)
class KernelSizes:
    """What is measured; the defaults are for a GPU."""

    queries: int = 4096
    keys: tuple[int, ...] = (8192, 32768)
    heads: int = 24
    key_heads: int = 4
    head_dim: int = 256
    delta_tokens: int = 8192
    delta_heads: int = 48
    delta_dim: int = 128
    repeat: int = 5
    dtype: torch.dtype = torch.bfloat16


def find_hardware(name: str) -> Hardware | None:
    """The table's entry of a device by the name that CUDA gives it, such as NVIDIA H100 80GB HBM3."""
    return next((hardware for key, hardware in HARDWARE.items() if key in name.replace("-", " ").split()), None)


def time_call(work: Callable[[], object], repeat: int) -> float:
    """Median seconds of `repeat` calls after one that is not counted."""
    seconds = []
    for _ in range(repeat + 1):
        _synchronize()
        started = time.perf_counter()
        work()
        _synchronize()
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:])


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def judge(seconds: float, flops: float, size: float, hardware: Hardware | None) -> dict[str, float]:
    """Rates, and the fraction of the roofline where the device is known. size: bytes."""
    found = {"seconds": seconds, "tflops": flops / seconds / 1e12, "gbytes_per_second": size / seconds / 1e9}
    if hardware is not None:
        least = max(flops / hardware.flops_16, size / hardware.memory_bandwidth)
        found |= {"roofline_seconds": least, "roofline_fraction": least / seconds}
    return found


def measure_attention(sizes: KernelSizes, keys: int, device: str, hardware: Hardware | None) -> dict[str, dict]:
    """Forward and backward of a chunk's queries over earlier pages, all of which they see."""
    shape, groups = (1, sizes.heads, sizes.queries, sizes.head_dim), (1, sizes.key_heads, keys, sizes.head_dim)
    q, do = (torch.randn(shape, device=device, dtype=sizes.dtype) for _ in range(2))
    k, v = (torch.randn(groups, device=device, dtype=sizes.dtype) for _ in range(2))
    scale = sizes.head_dim**-0.5
    o, lse = attend_fwd(q, k, v, False, scale)
    flops = 4.0 * sizes.heads * sizes.queries * keys * sizes.head_dim
    inputs, pages = q.nbytes, 2 * k.nbytes
    forward = time_call(lambda: attend_fwd(q, k, v, False, scale), sizes.repeat)
    backward = time_call(lambda: attend_bwd(do, q, k, v, o, lse, False, scale), sizes.repeat)
    return {
        "forward": judge(forward, flops, 2 * inputs + pages + lse.nbytes, hardware),
        "backward": judge(backward, 2.5 * flops, 4 * inputs + 2 * pages + lse.nbytes, hardware),
    }


def find_delta_rules() -> dict[str, Callable]:
    """Ours in torch, and flash-linear-attention's where it is installed and there is a GPU for it."""
    rules: dict[str, Callable] = {"torch": chunked_delta_rule}
    if torch.cuda.is_available():
        try:
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        except ImportError:
            return rules

        def fused(q, k, v, g, beta, state):
            return chunk_gated_delta_rule(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True)

        rules["fused"] = fused
    return rules


def measure_delta_rule(sizes: KernelSizes, rule: Callable, device: str, hardware: Hardware | None) -> dict[str, dict]:
    """Forward, and forward with backward, of a chunk from a state to a state."""
    tokens, heads, dim = sizes.delta_tokens, sizes.delta_heads, sizes.delta_dim
    q, k, v, do = (torch.randn(1, tokens, heads, dim, device=device, dtype=sizes.dtype) for _ in range(4))
    k = torch.nn.functional.normalize(k, dim=-1)
    g = -0.1 * torch.rand(1, tokens, heads, device=device)
    beta, state = torch.rand_like(g), torch.zeros(1, heads, dim, dim, device=device)
    leaves = [t.requires_grad_() for t in (q, k, v, g, beta, state)]

    def both():
        o, end = rule(*leaves)
        torch.autograd.grad((o * do).sum() + end.sum(), leaves)

    with torch.no_grad():
        forward = time_call(lambda: rule(*leaves), sizes.repeat)
    # As the dry run counts: products of [C, C] with [C, K or V] and a system's inverse in a chunk, and of states between chunks.
    flops = tokens * heads * (2.0 * DELTA_CHUNK * (3 * dim + 2 * dim) + 2.0 * DELTA_CHUNK**2 / 3 + 6.0 * dim * dim)
    size = 4 * q.nbytes + g.nbytes + beta.nbytes + 2 * state.nbytes
    return {
        "forward": judge(forward, flops, size, hardware),
        "forward_backward": judge(time_call(both, sizes.repeat), 3.5 * flops, 4 * size, hardware),
    }


def measure_kernels(sizes: KernelSizes, device: str, hardware: Hardware | None) -> dict[str, dict]:
    """Every kernel, by name."""
    found = {}
    for keys in sizes.keys:
        for way, figures in measure_attention(sizes, keys, device, hardware).items():
            found[f"attention_{sizes.queries}x{keys}_{way}"] = figures
    for name, rule in find_delta_rules().items():
        for way, figures in measure_delta_rule(sizes, rule, device, hardware).items():
            found[f"delta_rule_{name}_{sizes.delta_tokens}_{way}"] = figures
    return found
