"""One LoGRA update as a file: what an inference engine needs to follow the trainer, instead of all weights.

d rows and k columns of a whole weight W, R sketch rank, A [R, k], U = row_scale * S [d, R].

An update is W <- W - step * U A, and A follows from a seed: the file holds U of every weight in float32, and a manifest
(JSON in the safetensors metadata) with the seed, the steps and the sizes of the tiles that the trainer multiplied in.
Applied to a float32 copy of the weights from before the update, on the kind of device that the trainer ran on, it gives
the trainer's float32 weights bit for bit; the manifest has a checksum of both sides, so neither another base nor a
delta that was applied already goes unseen. U is d x R where W is d x k: at rank 256, a tenth of bfloat16 weights with
5,120 columns.

    write_delta(path, {name: scale_rows(sketch, row_scale)}, manifest)
    apply_delta(path, copies)                                 # in place, float32 [d, k] each
    served = {name: round_as_trainer(copy) for name, copy in copies.items()}

A bfloat16 model is followed by float32 copies on the host, which are what the trainer's weights and remainders are
together. Row-parallel shards of a trainer cut a weight's columns: it gives the whole weight's bits where the cut lies
between tiles.

Left out: how names map to those of an engine, transport, and weights that sketches do not cover (--logra-train-rest),
which have to be sent whole.
"""

import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from longstraw.durable_files import let_others_read, sync_path
from longstraw.optim.masters import split_float32
from longstraw.optim.projection import Projection
from longstraw.optim.sketch import BlockLimits
from longstraw.optim.update import apply_update
from longstraw.receipts.collect import checksum_tensors, join_checksums

FORMAT_VERSION = 1
_METADATA_KEY = "longstraw_weight_delta"
_NAMES_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class WeightStep:
    """What differs between the weights of one update."""

    columns: int
    """k."""

    step: float
    """As `apply_update` gets it. The file spells it in hexadecimal, which loses nothing."""


@dataclass(frozen=True, kw_only=True)
class DeltaManifest:
    """Everything about an update but U."""

    step: int
    """The optimizer step that the update makes, from 1 on."""

    base: str
    """`checksum_weights` of the float32 weights before the update, of those that it moves."""

    result: str
    """The same after it."""

    rank: int
    """R."""

    kind: str
    """Entries of A: rademacher or gaussian."""

    seed: int
    draw: int

    entries_at_once: int
    """`BlockLimits.entries` of the update: with R, the columns of a tile."""

    rows_at_once: int
    """Rows of a tile."""

    weights: Mapping[str, WeightStep]
    """By the weight's name in the whole model."""

    payload: str = ""
    """`checksum_weights` of U; `write_delta` fills it in."""

    def projection(self, name: str) -> Projection:
        """A of one weight."""
        columns = self.weights[name].columns
        return Projection(
            name=name, rank=self.rank, columns=columns, seed=self.seed, draw=self.draw, kind=self.kind
        )


def scale_rows(sketch: torch.Tensor, row_scale: torch.Tensor | None) -> torch.Tensor:
    """U = row_scale * S [d, R] float32, with the bits that `apply_update` multiplies by."""
    return sketch if row_scale is None else sketch * row_scale[:, None].to(sketch.dtype)


def round_as_trainer(full: torch.Tensor) -> torch.Tensor:
    """float32 -> the bfloat16 that a trainer with remainders computes with.

    An ordinary cast differs where a weight lies half-way between two bfloat16.
    """
    return split_float32(full)[0]


def checksum_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """One checksum over names and bits of (name, tensor) pairs, whatever their order; a few tensors at a time are held."""
    threads = min(8, os.cpu_count() or 1)
    found: dict[str, str] = {}
    with ThreadPoolExecutor(threads) as pool:  # hashing lets other threads run
        weights = iter(weights)
        while part := list(itertools.islice(weights, threads)):
            found |= zip((name for name, _ in part), pool.map(lambda pair: checksum_tensors([pair]), part))
    return join_checksums(found[name] for name in sorted(found))


def write_delta(path: str | Path, entries: Mapping[str, torch.Tensor], manifest: DeltaManifest) -> int:
    """Write an update; returns the file's bytes. A reader sees the whole file or none, whenever the writer is killed.

    Args:
        entries: name -> U [d, R] float32 of the whole weight, finite.

    Raises:
        ValueError: entries and manifest do not fit, in one sentence.
    """
    path = Path(path)
    _compare_names(entries.keys(), manifest.weights.keys(), "the tensors of the update", "its manifest")
    for name, entry in entries.items():
        manifest.projection(name)  # refuses a rank above the columns, an unknown kind, a draw below 0
        if entry.dtype != torch.float32 or entry.dim() != 2 or entry.shape[1] != manifest.rank:
            raise ValueError(
                f"U of {name} must be float32 [d, {manifest.rank}], got {entry.dtype} {list(entry.shape)}."
            )
        if not (torch.isfinite(entry).all() and math.isfinite(manifest.weights[name].step)):
            raise ValueError(f"the update of {name} is not finite.")
    tensors = {name: entry.detach().cpu().contiguous() for name, entry in entries.items()}
    whole = replace(manifest, payload=checksum_weights(tensors.items()))
    partial = path.with_name(f"{path.name}.partial")
    save_file(tensors, partial, metadata={_METADATA_KEY: _to_json(whole)})
    let_others_read(partial)
    sync_path(partial)
    os.replace(partial, path)
    sync_path(path.parent)
    return path.stat().st_size


def read_manifest(path: str | Path) -> DeltaManifest:
    """The manifest of a file; of the tensors only the header is read.

    Raises:
        ValueError: the file is missing, cut short, no weight delta, or of another format version, in one sentence.
    """
    with _opened(path) as file:
        return _parse(path, file.metadata())


@torch.no_grad()
def apply_delta(path: str | Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Make the update that a file holds, in place.

    Args:
        weights: float32 [d, k] by name: those that the update moves, all of them and no others.

    Raises:
        ValueError: in one sentence, with nothing changed: a file that `read_manifest` refuses or whose tensors are
            damaged, other names or shapes, weights that are not those from before the update (so also an update made a
            second time). With the update made: the result has other bits than the trainer's, whose device multiplies
            otherwise.
    """
    with _opened(path) as file:
        manifest = _parse(path, file.metadata())
        _compare_names(weights.keys(), manifest.weights.keys(), "the weights", str(path))
        _compare_names(file.keys(), manifest.weights.keys(), f"the tensors of {path}", "its manifest")
        for name, weight in weights.items():
            shape = tuple(file.get_slice(name).get_shape())
            if weight.dtype != torch.float32 or shape != (*weight.shape[:1], manifest.rank) or (
                tuple(weight.shape[1:]) != (manifest.weights[name].columns,)
            ):
                raise ValueError(
                    f"{path} moves {name} as float32 [{shape[0]}, {manifest.weights[name].columns}], which is "
                    f"{weight.dtype} {list(weight.shape)} here."
                )
        if checksum_weights((name, file.get_tensor(name)) for name in manifest.weights) != manifest.payload:
            raise ValueError(f"{path} is damaged: its tensors are not those that were written.")
        found = checksum_weights(weights.items())
        if found != manifest.base:
            done = " (they hold it already)" if found == manifest.result else ""
            raise ValueError(
                f"{path} is the update of step {manifest.step} to weights with checksum {manifest.base}; these have "
                f"{found}{done}."
            )
        for name in sorted(weights):
            apply_update(
                weights[name], file.get_tensor(name).to(weights[name].device), manifest.projection(name),
                manifest.weights[name].step, rows_at_once=manifest.rows_at_once,
                limits=BlockLimits(entries=manifest.entries_at_once),
            )  # fmt: skip
    if checksum_weights(weights.items()) != manifest.result:
        raise ValueError(
            f"{path} was applied, but the weights differ from the trainer's in the last bits: this device multiplies "
            "otherwise, so load the trainer's weights whole and apply updates on its kind of device."
        )


@dataclass(frozen=True, kw_only=True)
class DeltaSize:
    """Bytes of a file, and of the whole weights that it stands for."""

    payload: int
    weights: int


def measure_delta(path: str | Path, *, bytes_per_weight: int = 2) -> DeltaSize:
    """What a file saves against sending its weights whole (default: in 16 bits). Raises as `read_manifest`."""
    with _opened(path) as file:
        manifest = _parse(path, file.metadata())
        numbers = sum(file.get_slice(name).get_shape()[0] * one.columns for name, one in manifest.weights.items())
    return DeltaSize(payload=Path(path).stat().st_size, weights=numbers * bytes_per_weight)


@contextmanager
def _opened(path: str | Path):
    """The file's lazy reader; what safetensors says of a bad one becomes a ValueError."""
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            yield file
    except FileNotFoundError:
        raise ValueError(f"{path}: no such weight delta.") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is cut short or no safetensors file: {error}.") from None


def _to_json(manifest: DeltaManifest) -> str:
    plain = asdict(manifest)
    plain["weights"] = {name: {"columns": w.columns, "step": w.step.hex()} for name, w in manifest.weights.items()}
    return json.dumps({"format_version": FORMAT_VERSION} | plain)


def _parse(path: str | Path, metadata: Mapping[str, str] | None) -> DeltaManifest:
    text = (metadata or {}).get(_METADATA_KEY)
    if text is None:
        raise ValueError(f"{path} is no weight delta: its metadata has no {_METADATA_KEY}.")
    try:
        plain = json.loads(text)
        version = plain.pop("format_version")
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is no weight delta: its manifest does not read ({error}).") from None
    if version != FORMAT_VERSION:
        raise ValueError(f"{path} has format version {version}, and this program reads version {FORMAT_VERSION}.")
    try:
        steps = {
            name: WeightStep(columns=int(w["columns"]), step=float.fromhex(w["step"]))
            for name, w in plain.pop("weights").items()
        }
        return DeltaManifest(**plain, weights=steps)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no weight delta: its manifest does not read ({error}).") from None


def _compare_names(found: Iterable[str], wanted: Iterable[str], of: str, against: str) -> None:
    missing, unknown = sorted({*wanted} - {*found}), sorted({*found} - {*wanted})
    if missing or unknown:
        parts = [f"lack {_list(missing)}"] if missing else []
        parts += [f"have {_list(unknown)}"] if unknown else []
        raise ValueError(f"{of} {' and '.join(parts)}, unlike {against}.")


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
