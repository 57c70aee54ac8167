"""What accelerators and the links around them can do at most, and how much of it work like ours gets.

Peaks are the vendors' (dense, no sparsity), a GPU each. Efficiencies are what the estimate multiplies them by: assumptions,
stated here and in every report, to be replaced by measurements where there are any.
"""

from dataclasses import dataclass

TERA, GIGA, MIB = 1e12, 1e9, 2**20


@dataclass(frozen=True, kw_only=True)
class Efficiencies:
    """The part of a peak that is got."""

    matmul: float = 0.70
    """Of matrix products."""
    attention: float = 0.60
    """Of the flash kernels."""
    delta_rule: float = 0.30
    """Of the chunked delta rule, whose products are small."""
    memory: float = 0.80
    """Of the device's memory."""
    link: float = 0.75
    """Of links between GPUs and between nodes."""
    copy: float = 0.80
    """Of the link to the host."""
    host: float = 0.50
    """Of the host's memory, when the CPU adds into it."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One GPU, its share of its host, and its links; rates a second and in one direction."""

    name: str
    memory: int
    """Bytes of device memory, as the driver shows them (nvidia-smi): a GPU sold with 96 GB has 102.6 GB of 10^9."""
    flops_16: float
    """Operations with 16-bit operands."""
    flops_32: float
    """Operations with float32 operands, outside the tensor cores."""
    memory_bandwidth: float
    link_bandwidth: float
    """To the other GPUs of the node."""
    network_bandwidth: float = 50 * GIGA
    """To GPUs of other nodes: 400 Gbit/s a GPU."""
    copy_bandwidth: float = 55 * GIGA
    """To the host: PCIe 5.0 x16."""
    host_bandwidth: float = 75 * GIGA
    """Of the host's memory, an eighth of a node's."""
    launch: float = 5e-6
    """Seconds that a kernel takes at least."""
    exchange_latency: float = 20e-6
    """Seconds that a collective takes at least."""
    efficiencies: Efficiencies = Efficiencies()


HARDWARE = {
    hardware.name: hardware
    for hardware in (
        Hardware(
            name="H20", memory=97_871 * MIB, flops_16=148 * TERA, flops_32=44 * TERA, memory_bandwidth=4.0 * TERA,
            link_bandwidth=450 * GIGA,
        ),
        Hardware(
            name="H100", memory=81_559 * MIB, flops_16=989 * TERA, flops_32=67 * TERA, memory_bandwidth=3.35 * TERA,
            link_bandwidth=450 * GIGA,
        ),
        Hardware(
            name="H200", memory=143_771 * MIB, flops_16=989 * TERA, flops_32=67 * TERA, memory_bandwidth=4.8 * TERA,
            link_bandwidth=450 * GIGA,
        ),
        Hardware(
            name="B200", memory=183_359 * MIB, flops_16=2250 * TERA, flops_32=75 * TERA, memory_bandwidth=8.0 * TERA,
            link_bandwidth=900 * GIGA,
        ),
    )
}
"""By name."""
