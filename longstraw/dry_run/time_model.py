"""How long a step may take, from what a dry run counted: a bound that no implementation beats, and an estimate.

Of each phase and row:

    attention, matmul, delta_rule     operations over the hardware's rate, where they take longer than their traffic
    memory                            traffic of everything else
    launches                          the least time of a kernel, of all kernels that take less
    exchange over GROUP               bytes that collectives receive, over the slowest link that they cross, and latencies
    copies in                         to the device: pages, a layer ahead
    copies out                        to the host: pages and gradients
    host                              what the CPU adds up in host memory

The bound of a phase is its longest row at peak rates, as if all else hid behind it, launches and latencies left out. The
estimate adds all rows at their efficiencies but copies in, which hide behind the others where they are shorter. The row that
limits is the longest of the estimate.

Left out: waiting for slower ranks, the sampler's and verifier's time, stragglers of the network.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from longstraw.dry_run.counter import GroupSpan, OperationCounter, PhaseCounts
from longstraw.dry_run.hardware import Hardware


@dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """Seconds of one phase. rows: of the estimate, by name."""

    bound: float
    estimate: float
    rows: Mapping[str, float]

    @property
    def limit(self) -> str:
        """The longest row."""
        return max(self.rows, key=self.rows.__getitem__, default="nothing")


def estimate_times(counter: OperationCounter, hardware: Hardware) -> dict[str, PhaseTime]:
    """Of every phase that did something."""
    found = {name: time_phase(counts, counter.spans, hardware) for name, counts in counter.read().items()}
    return {name: time for name, time in found.items() if time.rows}


def time_phase(counts: PhaseCounts, spans: Mapping[str, GroupSpan], hardware: Hardware) -> PhaseTime:
    """One phase's."""
    rows, bounds = dict(counts.seconds[hardware.name]), {}
    part = hardware.efficiencies
    bounds["operations"] = sum(
        operations / (hardware.flops_32 if kind == "matmul_32" else hardware.flops_16)
        for kind, operations in counts.operations.items()
    )
    bounds["memory"] = counts.least_traffic / hardware.memory_bandwidth
    for (group, operation, unit), calls in counts.collectives.items():
        if unit != "calls":
            continue
        received = received_bytes(operation, counts.collectives[group, operation, "bytes"], spans[group].size)
        bandwidth = hardware.link_bandwidth if spans[group].nodes == 1 else hardware.network_bandwidth
        name = f"exchange over {group}"
        bounds[name] = bounds.get(name, 0.0) + received / bandwidth
        rows[name] = rows.get(name, 0.0) + received / (bandwidth * part.link) + calls * hardware.exchange_latency
    for name, size in (("copies in", counts.copies_in), ("copies out", counts.copies_out)):
        bounds[name], rows[name] = size / hardware.copy_bandwidth, size / (hardware.copy_bandwidth * part.copy)
    bounds["host"] = counts.host_traffic / hardware.host_bandwidth
    rows["host"] = counts.host_traffic / (hardware.host_bandwidth * part.host)
    rows = {name: seconds for name, seconds in rows.items() if seconds > 0.0}
    others = sum(seconds for name, seconds in rows.items() if name != "copies in")
    return PhaseTime(bound=max(bounds.values()), estimate=max(others, rows.get("copies in", 0.0)), rows=rows)


def received_bytes(operation: str, size: float, ranks: int) -> float:
    """What a rank receives in a collective whose larger buffer has that size."""
    others = (ranks - 1) / ranks
    return {"all_reduce": 2 * others, "broadcast": min(1, ranks - 1)}.get(operation, others) * size
