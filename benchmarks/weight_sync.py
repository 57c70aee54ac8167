"""Bytes and seconds of bringing an engine to the next weights: whole, as a LoGRA update, as a low-rank adapter.

    python benchmarks/weight_sync.py --model-preset smollm2-135m --logra-rank 64 --lora-rank 16 --json -

Measured: one process writes the three versions of a model with random weights as a training run on one rank does, and a vLLM
server on this machine takes them (tools/setup_vllm.sh). Seconds are those of the writer and of the server; every kind is
taken `--repeat` times, and the median told. A LoGRA update is told at its second time: the first also reads the host copy.

By shape: the bytes of the same three for large models, bfloat16, and how long they take at `--gbytes-per-second`, which is
arithmetic: bytes over rate. What writing, hashing and loading add is not in it.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from longstraw.optim.projection import Projection  # noqa: E402
from longstraw.optim.sketch import BlockLimits  # noqa: E402
from longstraw.optim.update import apply_update  # noqa: E402
from longstraw.optim.updated_weight import ROWS_AT_ONCE  # noqa: E402
from longstraw.rollout.vllm_client import VllmEngine, launch_server, stop, wait_until_ready  # noqa: E402
from longstraw.rollout.weight_delta import (  # noqa: E402
    DeltaManifest, WeightStep, checksum_weights, round_as_trainer, write_delta,
)
from longstraw.rollout.weight_export import ShardWriter, complete_folder, open_folder  # noqa: E402
from longstraw.rollout.weight_folder import (  # noqa: E402
    DELTA_FILE, MAP_FILE, FolderManifest, hash_file, read_manifest, version_folder, write_manifest,
)
from longstraw.rollout.weight_map import MappedWeight, write_map  # noqa: E402
from megatron.grpo.adapter_export import ADAPTER_FILES, write_adapter  # noqa: E402
from megatron.grpo.conversion.architecture import hf_config_from_preset  # noqa: E402
from megatron.grpo.conversion.names import ParameterMap, map_parameters  # noqa: E402
from megatron.grpo.presets import ModelPreset, get_preset  # noqa: E402
from tools.tool_flags import check_at_least_1, check_report_path  # noqa: E402
from tools.tool_reports import write_report  # noqa: E402

PROJECTIONS = tuple(
    f".{name}.weight" for name in (
        "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj", "linear_q_down_proj",
        "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj",
    )
)  # fmt: skip
"""Endings of the matrices that LoGRA moves and LoRA adapts."""

STEP = 1e-4


def is_projection(name: str) -> bool:
    """Whether a weight is one of the matrices that `longstraw.patches.projections` finds."""
    return name.endswith(PROJECTIONS) and ".indexer." not in name


def shape_of(entry: ParameterMap) -> tuple[int, int]:
    """Rows and columns of a matrix."""
    return sum(shape[0] for _, shape in entry.sources), entry.sources[0][1][1]


# --- By shape --------------------------------------------------------------------------------------------------------


def count_bytes(preset: ModelPreset, *, logra_rank: int, lora_rank: int, bytes_per_weight: int = 2) -> dict[str, int]:
    """Bytes of the tensors of each kind. An adapter has an A for each of the checkpoint's matrices."""
    full = delta = lora = 0
    for entry in map_parameters(preset):
        full += bytes_per_weight * sum(torch.Size(shape).numel() for _, shape in entry.sources)
        if is_projection(entry.megatron):
            rows, columns = shape_of(entry)
            delta += 4 * rows * logra_rank
            lora += bytes_per_weight * lora_rank * (rows + columns * len(entry.sources))
    return {"full": full, "delta": delta, "lora": lora}


def count_by_shape(args: argparse.Namespace, name: str) -> dict:
    """A large model's figures."""
    found = count_bytes(get_preset(name), logra_rank=args.shape_logra_rank, lora_rank=args.lora_rank)
    return {
        kind: {"bytes": size, "full_over_this": found["full"] / size,
               "seconds_at_rate": {f"{rate:g} GB/s": size / rate / 1e9 for rate in args.gbytes_per_second}}
        for kind, size in found.items()
    }  # fmt: skip


# --- Measured --------------------------------------------------------------------------------------------------------


class Writer:
    """Versions of a model with random weights, as a run on one rank writes them."""

    def __init__(self, preset: ModelPreset, root: Path, dtype: torch.dtype, args: argparse.Namespace):
        self.preset, self.root, self.dtype, self.args = preset, root, dtype, args
        self.maps = map_parameters(preset)
        generator = torch.Generator().manual_seed(0)
        self.tensors = {
            name: (0.02 * torch.randn(shape, generator=generator) + (len(shape) == 1)).to(dtype)
            for entry in self.maps for name, shape in entry.sources
        }
        self.moved = [MappedWeight(e.megatron, e.sources, e.layout) for e in self.maps if is_projection(e.megatron)]
        self.weights = {
            w.name: w.layout.merge([self.tensors[name].float() for name, _ in w.sources]).clone() for w in self.moved
        }

    def write_full(self, number: int) -> None:
        """Whole weights as they are."""
        folder = version_folder(self.root, number)
        open_folder(folder)
        shards = ShardWriter(folder, rank=0)
        for name, tensor in self.tensors.items():
            shards.add(name, tensor)
        config = hf_config_from_preset(self.preset, dtype=str(self.dtype).removeprefix("torch."))
        complete_folder(folder, [shards.close()], FolderManifest(kind="full", version=number), config=config)

    def move(self, number: int) -> tuple[dict, DeltaManifest]:
        """The weights of the next version -> U of every matrix, and what the trainer would say of it."""
        base, entries, limits = checksum_weights(self.weights.items()), {}, BlockLimits()
        for name, weight in self.weights.items():
            drawn = Projection(
                name=name, rank=self.args.logra_rank, columns=weight.shape[1], seed=1, draw=number, kind="rademacher"
            )
            generator = torch.Generator().manual_seed(number)
            entries[name] = torch.randn(weight.shape[0], self.args.logra_rank, generator=generator)
            apply_update(weight, entries[name], drawn, STEP, rows_at_once=ROWS_AT_ONCE, limits=limits)
        for weight in self.moved:
            whole = self.weights[weight.name]
            whole = whole if self.dtype == torch.float32 else round_as_trainer(whole)
            self.tensors |= {name: part.contiguous() for name, part in weight.split(whole)}
        return entries, DeltaManifest(
            step=number, base=base, result=checksum_weights(self.weights.items()), rank=self.args.logra_rank,
            kind="rademacher", seed=1, draw=number, entries_at_once=limits.entries, rows_at_once=ROWS_AT_ONCE,
            weights={n: WeightStep(columns=w.shape[1], step=STEP) for n, w in self.weights.items()},
        )

    def write_delta(self, number: int, entries: dict, manifest: DeltaManifest) -> None:
        """An update that was made."""
        folder = version_folder(self.root, number)
        open_folder(folder)
        write_map(folder / MAP_FILE, self.moved)
        write_delta(folder / DELTA_FILE, entries, manifest)
        self._complete(folder, FolderManifest(kind="delta", version=number, base_version=number - 1), (DELTA_FILE, MAP_FILE))

    def write_lora(self, number: int, base: int) -> None:
        """An adapter of random pairs of the weights of version `base`."""
        folder, rank, tensors = version_folder(self.root, number), self.args.lora_rank, {}
        open_folder(folder)
        for weight in self.moved:
            for name, (rows, columns) in weight.sources:
                prefix = f"base_model.model.{name.removesuffix('.weight')}"
                tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, columns).to(self.dtype)
                tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, rank).mul(1e-3).to(self.dtype)
        write_adapter(folder, tensors, rank=rank, alpha=rank)
        checksum = read_manifest(version_folder(self.root, base)).checksum
        manifest = FolderManifest(kind="lora", version=number, base_version=base, base_checksum=checksum)
        self._complete(folder, manifest, ADAPTER_FILES)

    def _complete(self, folder: Path, manifest: FolderManifest, names) -> None:
        files = {name: hash_file(folder / name) for name in names}
        write_manifest(folder, FolderManifest(**vars(manifest) | {"files": files}))


def measure(args: argparse.Namespace) -> dict:
    """Writer's and server's seconds and bytes of each kind."""
    dtype = getattr(torch, args.dtype)
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        writer = Writer(get_preset(args.model_preset), Path(folder) / "weights", dtype, args)
        written: dict[str, list[float]] = {"full": [], "delta": [], "lora": []}
        synced: dict[str, list] = {"full": [], "delta": [], "lora": []}
        writer.write_full(0)
        flags = ["--model", str(version_folder(writer.root, 0)), "--max-model-len", "256", "--max-lora-rank", str(args.lora_rank),
                 "--tensor-parallel-size", str(args.tensor_parallel_size)]  # fmt: skip
        server = launch_server(flags, folder=Path(folder) / "server")
        try:
            wait_until_ready(server, seconds=600)
            with VllmEngine(server.ready_file) as engine:
                number = 0
                for _ in range(args.repeat + 1):
                    number += 1
                    update = writer.move(number)
                    written["delta"].append(timed(lambda: writer.write_delta(number, *update)))
                    synced["delta"].append(engine.sync(version_folder(writer.root, number), number))
                after_updates = engine.checksums()
                for _ in range(args.repeat):
                    number += 1
                    written["full"].append(timed(lambda: writer.write_full(number)))
                    synced["full"].append(engine.sync(version_folder(writer.root, number), number))
                same_bits, base = engine.checksums() == after_updates, number
                for _ in range(args.repeat):
                    number += 1
                    written["lora"].append(timed(lambda: writer.write_lora(number, base)))
                    synced["lora"].append(engine.sync(version_folder(writer.root, number), number))
        finally:
            stop(server)
    written["delta"], synced["delta"] = written["delta"][1:], synced["delta"][1:]
    full = synced["full"][0].bytes
    return {"same_bits_after_updates_and_full": same_bits, "dtype": args.dtype, "ranks": args.tensor_parallel_size} | {
        kind: {
            "bytes": results[0].bytes, "full_over_this": full / results[0].bytes,
            "write_seconds": statistics.median(written[kind]),
            "sync_seconds": statistics.median(result.seconds for result in results),
        }
        for kind, results in synced.items()
    }


def timed(work) -> float:
    """Seconds that it took."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The benchmark's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model-preset", default="smollm2-135m", help="model that is measured, with random weights; none: by shape alone")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the measured model")
    add("--tensor-parallel-size", type=int, default=1, help="vLLM ranks")
    add("--logra-rank", type=int, default=64, help="rank of the measured updates")
    add("--lora-rank", type=int, default=16, help="rank of adapters, measured and by shape")
    add("--repeat", type=int, default=3, help="syncs of each kind")
    add("--directory", help="where the folders go; default: the system's place for temporary files")
    add("--shapes", nargs="*", default=["qwen3.6-27b", "glm-5.2"], help="models that are counted by shape")
    add("--shape-logra-rank", type=int, default=256, help="rank of the updates that are counted by shape")
    add("--gbytes-per-second", type=float, nargs="+", default=[3.0, 25.0], help="rates to divide bytes by")
    add("--json", metavar="PATH", help="also write the report as JSON; - is standard output")
    args = parser.parse_args(argv)
    check_at_least_1(parser, args, ("tensor_parallel_size", "logra_rank", "lora_rank", "repeat", "shape_logra_rank"))
    if args.json:
        check_report_path(parser, args.json)
    return args


def print_table(report: dict) -> None:
    """The figures for people."""
    for model, figures in ({"measured": report["measured"]} | report["by_shape"]).items():
        for kind in ("full", "delta", "lora"):
            if kind in figures:
                plain = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in figures[kind].items() if k != "seconds_at_rate"}
                rates = {k: f"{v:.3g} s" for k, v in figures[kind].get("seconds_at_rate", {}).items()}
                print(f"{model:12} {kind:6} {json.dumps(plain | rates)}", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """The command line program; returns the exit code."""
    args = parse_arguments(argv)
    report = {
        "settings": {key: value for key, value in vars(args).items() if key != "json"},
        "measured": {} if args.model_preset == "none" else measure(args),
        "by_shape": {name: count_by_shape(args, name) for name in args.shapes},
    }
    print_table(report)
    if args.json:
        write_report(report, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
