"""Which tensors of a Hugging Face checkpoint make which weight of the trainer, as a file beside an update.

An update names the trainer's weights; an engine knows those of the checkpoint. The trainer writes what it knows of both:

    {"weights": [{"name": "decoder.layers.0.self_attention.linear_qkv.weight",
                  "sources": [["model.layers.0.self_attn.q_proj.weight", [576, 576]], ...],
                  "layout": {"kind": "grouped_qkv", "heads": 9, "groups": 3, "head_dim": 64, "gated": false}}, ...]}

Left out: where the map comes from (`megatron.grpo.conversion.names`), and everything that is not a reordering of rows.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from longstraw.rollout.row_layouts import GroupedQKV, StackedRows

FORMAT_VERSION = 1
_LAYOUTS = {"stacked_rows": StackedRows, "grouped_qkv": GroupedQKV}


@dataclass(frozen=True)
class MappedWeight:
    """One weight of the trainer, whole; its sources by name and shape, and how their rows lie in it."""

    name: str
    sources: tuple[tuple[str, tuple[int, ...]], ...]
    layout: StackedRows | GroupedQKV

    def split(self, whole: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """(name, tensor) of each source, from the weight."""
        return [(name, part) for (name, _), part in zip(self.sources, self.layout.split(whole), strict=True)]


def write_map(path: Path, weights: Iterable[MappedWeight]) -> None:
    """Write the file."""
    kinds = {layout: kind for kind, layout in _LAYOUTS.items()}
    plain = [
        {"name": w.name, "sources": w.sources, "layout": {"kind": kinds[type(w.layout)]} | asdict(w.layout)}
        for w in weights
    ]
    path.write_text(json.dumps({"format_version": FORMAT_VERSION, "weights": plain}, indent=1) + "\n")


def read_map(path: str | Path) -> list[MappedWeight]:
    """Read a file. Raises ValueError, in one sentence, where it is missing or none."""
    try:
        plain = json.loads(Path(path).read_text())
        if plain["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format version {plain['format_version']} instead of {FORMAT_VERSION}")
        return [_read_weight(entry) for entry in plain["weights"]]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no map of weights: {error}.") from None


def _read_weight(entry: dict) -> MappedWeight:
    layout = dict(entry["layout"])
    kind = _LAYOUTS[layout.pop("kind")]
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in layout.items()}
    return MappedWeight(
        entry["name"], tuple((name, tuple(shape)) for name, shape in entry["sources"]), kind(**values)
    )
