"""Gathers what a receipt states: versions, who holds which state, checksums of weights.

Left out: collectives. Each rank summarises itself; the caller gathers the summaries on rank 0.
"""

import hashlib
import importlib.metadata
import platform
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any

import longstraw
from longstraw.receipts.receipt import ResidentState, Versions

OPTIONAL_PACKAGES = ("flash-attn", "flash-linear-attention", "transformer-engine", "triton", "transformers", "vllm")


def collect_versions() -> Versions:
    """Versions of what is installed here, read from package metadata: nothing is imported."""
    others = {}
    for name in OPTIONAL_PACKAGES:
        try:
            others[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Versions(longstraw=longstraw.__version__, torch=importlib.metadata.version("torch"), python=platform.python_version(),
                    megatron_core=importlib.metadata.version("megatron-core"), others=others)


def now_utc() -> str:
    """The moment, as receipts write it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def summarize_state(rank: int, entries: Iterable[Any]) -> tuple[ResidentState, ...]:
    """A ledger's entries (`longstraw.prompt_state.ledger.LedgerEntry`) by owner, class and residency.

    Take them at the step's fullest moment, on every rank, and gather the results on rank 0.
    """
    groups: dict[tuple, list] = {}
    for entry in entries:
        groups.setdefault((entry.owner, entry.kind, entry.residency), []).append(entry)
    return tuple(
        ResidentState(rank=rank, owner=owner, kind=kind, residency=residency, rows=sum(entry.rows for entry in group),
                      layers=len({entry.layer_number for entry in group}), bytes=sum(entry.bytes for entry in group))
        for (owner, kind, residency), group in sorted(groups.items()))


def checksum_tensors(tensors: Iterable[tuple[str, Any]]) -> str:
    """SHA-256 over the names, dtypes, shapes and bits of (name, tensor) pairs, whatever their order.

    Equal exactly when every bit is. A sharded model has one a rank: join them with `join_checksums`.
    """
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        tensor = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return f"sha256:{digest.hexdigest()}"


def join_checksums(checksums: Iterable[str]) -> str:
    """One checksum for the ranks', in rank order."""
    return f"sha256:{hashlib.sha256(' '.join(checksums).encode()).hexdigest()}"
