"""Each step's update for whoever follows the trainer's weights, and (--logra-delta-dir) a folder of them.

    writer.note(number, step)     before the weights move: U of every matrix, and a checksum of the weights
    writer.write(path)            after they have moved: the file, by rank 0

U and the weights are put together over tensor and expert parallelism matrix by matrix; ranks share out the hashing. The
weights' checksum after a step is the next one's base, so weights are hashed once a step.

Left out: sending the file anywhere; weights that sketches do not cover.
"""

import time
from pathlib import Path

import torch
import torch.distributed as dist

from longstraw.optim.updated_weight import ROWS_AT_ONCE
from longstraw.patches.projections import ProjectionMatrix
from longstraw.receipts.collect import checksum_tensors, join_checksums
from longstraw.rollout.weight_delta import DeltaManifest, WeightStep, write_delta
from megatron.grpo.agreed_writes import WriteFailure, write_on_rank_0
from megatron.grpo.logra import LograOptimizer
from megatron.grpo.sharding import is_expert, unshard_parameter, whole_name


def _open_folder(folder: Path, *, fresh: bool) -> str:
    """Make the folder; a sentence where that fails or a fresh run would mix its files with another's, else ""."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"--logra-delta-dir {folder} cannot be made: {error}"
    if fresh and any(folder.glob("step_*.safetensors")):
        return f"--logra-delta-dir {folder} holds the updates of another run: give an empty folder"
    return ""


class DeltaWriter:
    """Writes the updates of one run. Every method is collective."""

    def __init__(self, optimizer: LograOptimizer):
        self.optimizer, self.groups = optimizer, optimizer.groups
        self.pairs, self.logra = optimizer.updated_model.pairs, optimizer.logra
        self._base: str | None = None
        self._noted: tuple[int, dict[str, torch.Tensor], dict[str, WeightStep]] | None = None

    def base_checksum(self) -> str:
        """Of the float32 weights as they are, if nobody but this writer's updates has moved them since it was asked."""
        if self._base is None:
            self._base = self._checksum()
        return self._base

    def forget(self) -> None:
        """The weights have moved without an update of this writer's."""
        self._base = self._noted = None

    def note(self, number: int, step: float) -> None:
        """Before the weights move by step * U A."""
        self.base_checksum()
        entries, steps = {}, {}
        for matrix, weight in self.pairs:
            whole = self._whole(matrix, weight.factors(), rows_only=True)
            for name, tensor in whole.items():
                steps[name] = WeightStep(columns=weight.placement.columns, step=step)
                if dist.get_rank() == 0:
                    entries[name] = tensor.to("cpu", torch.float32)
        self._noted = (number, entries, steps)

    def write(self, path: Path) -> int:
        """After the weights have moved: the update that was noted, as a file by rank 0 -> its bytes, on every rank.

        Raises WriteFailure, on every rank, where it cannot be written.
        """
        number, entries, steps = self._noted
        self._noted = None
        result = self._checksum()

        def write_file() -> int:
            one = self.pairs[0][1].sketch
            manifest = DeltaManifest(
                step=number, base=self._base, result=result, rank=one.projection.rank, kind=one.projection.kind,
                seed=one.projection.seed, draw=one.projection.draw, entries_at_once=one.limits.entries,
                rows_at_once=ROWS_AT_ONCE, weights=steps,
            )
            return write_delta(path, entries, manifest)

        size = write_on_rank_0(write_file)
        self._base = result
        return size

    def _checksum(self) -> str:
        """Of the float32 weights of all matrices, as `longstraw.rollout.weight_delta.checksum_weights` has it."""
        found: dict[str, str] = {}
        for index, (matrix, weight) in enumerate(self.pairs):
            full = weight.weight.data if weight.masters is None else weight.masters.whole(weight.weight.data)
            for name, tensor in self._whole(matrix, full, rows_only=False).items():
                if index % dist.get_world_size() == dist.get_rank():
                    found[name] = checksum_tensors([(name, tensor)])
        gathered: list = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, found)
        everything = {name: value for part in gathered for name, value in part.items()}
        return join_checksums(everything[name] for name in sorted(everything))

    def _whole(self, matrix: ProjectionMatrix, shard: torch.Tensor, *, rows_only: bool) -> dict[str, torch.Tensor]:
        """A matrix's tensor put together over tensor parallelism, and those of the experts of its place on every rank.

        rows_only: the tensor is whole already where tensor parallelism divides the columns.
        """
        tp, ep = self.groups.tp, self.groups.ep
        if tp.size() > 1 and not matrix.expert and not (rows_only and matrix.split == "columns"):
            shards = [torch.empty_like(shard) for _ in range(tp.size())]
            dist.all_gather(shards, shard.contiguous(), group=tp)
            shard = unshard_parameter(matrix.name, shards, self.optimizer.preset)
        if ep.size() == 1 or not is_expert(matrix.name):
            return {matrix.name: shard}
        parts = [torch.empty_like(shard) for _ in range(ep.size())]
        dist.all_gather(parts, shard.contiguous(), group=ep)
        experts = self.optimizer.preset.num_experts
        return {whole_name(matrix.name, experts, rank, ep.size()): part for rank, part in enumerate(parts)}


class DeltaFolder:
    """The updates of one run as DIR/step_0000001.safetensors and so on (--logra-delta-dir)."""

    def __init__(self, folder: str | Path, optimizer: LograOptimizer, *, resumed_step: int = 0):
        """Collective. Raises ValueError, on every rank, where the folder cannot be made, or holds the files of another run
        (resumed_step 0)."""
        self.folder, self.writer, self._number = Path(folder), DeltaWriter(optimizer), 0
        problem = [_open_folder(self.folder, fresh=resumed_step == 0) if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(problem, src=0)
        if problem[0]:
            raise ValueError(problem[0])

    def note(self, number: int, step: float) -> None:
        """Before the weights move. Collective."""
        self._number = number
        self.writer.note(number, step)

    def finish(self) -> dict:
        """After they have moved -> `delta_bytes` and `delta_seconds`, equal on every rank. Collective."""
        started = time.perf_counter()
        try:
            size = self.writer.write(self.folder / f"step_{self._number:07d}.safetensors")
        except WriteFailure as error:
            raise WriteFailure(f"--logra-delta-dir {self.folder} cannot take step {self._number}: {error}") from None
        return {"delta_bytes": size, "delta_seconds": time.perf_counter() - started}
