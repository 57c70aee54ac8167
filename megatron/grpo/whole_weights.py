"""The whole weights of a model that is spread over ranks, tensor by tensor on the ranks that write them.

A tensor is written by one of the ranks that hold it, chosen so that all write about as much: every rank holds the dense
weights of its place in tensor parallelism, an expert's only the ranks of its expert-parallel rank. Ranks of tensor
parallelism put a weight together where its writer is one of them; nothing else is sent.

    weights = WholeWeights(model, preset, groups)
    reports = weights.write(folder)                          # collective: every rank's report, on every rank

Values are those that the model computes with; low-rank pairs are merged in (`merged`), and a caller may read a weight at
more precision (`read`).

Left out: pipeline parallelism.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from longstraw.patches.lora import find_pairs, is_pair
from longstraw.rollout.weight_export import DEFAULT_FILE_BYTES, ShardReport, ShardWriter, choose_writers
from megatron.grpo.agreed_writes import try_write, write_agreed
from megatron.grpo.conversion.names import ParameterMap, map_parameters
from megatron.grpo.conversion.weights import local_name, match_parameters
from megatron.grpo.presets import ModelPreset
from megatron.grpo.sharding import is_expert, partition_dim, unshard_parameter

Read = Callable[[str, torch.Tensor], torch.Tensor]
"""(a parameter's name on this rank, the parameter or buffer) -> this rank's part of what is written. May be collective
over the ranks that hold the same part."""


class WholeWeights:
    """See the module. read: default, as they are, with low-rank pairs left out."""

    def __init__(self, model: torch.nn.Module, preset: ModelPreset, groups: ProcessGroupCollection, *, read: Read | None = None):
        """Collective: ranks tell each other what they hold."""
        self.model, self.preset, self.groups = model, preset, groups
        self.read = read or (lambda name, tensor: tensor.detach())
        own = (dist.get_process_group_ranks(groups.tp), groups.ep.rank())
        self._ranks: list = [None] * dist.get_world_size()
        dist.all_gather_object(self._ranks, own)

    def write(self, folder: Path, *, names: Callable[[str], bool] = lambda name: True, file_bytes: int = DEFAULT_FILE_BYTES):
        """Write the weights whose whole Megatron name `names` takes into a folder that every rank sees -> every rank's
        ShardReport. Collective.

        Raises WriteFailure, on every rank, where one cannot write.
        """
        shards = ShardWriter(folder, rank=dist.get_rank(), file_bytes=file_bytes)
        failure = ""
        for name, tensor in self._own_tensors(names):  # collective: a rank that cannot write goes on
            if not failure:
                _, failure = try_write(lambda: shards.add(name, tensor))

        def close() -> ShardReport:
            if failure:
                raise ValueError(failure)
            return shards.close()

        own = write_agreed(close)
        reports: list[ShardReport] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, own)
        return reports

    def _own_tensors(self, names: Callable[[str], bool]):
        """(checkpoint name, tensor) of what this rank writes."""
        entries = [
            (entry, tensor)
            for entry, tensor in match_parameters(self.model, map_parameters(self.preset), self.preset, ignore=is_pair)
            if names(entry.megatron)
        ]
        sizes = [sum(torch.Size(shape).numel() for _, shape in entry.sources) for entry, _ in entries]
        writers = choose_writers(sizes, [self._holders(entry) for entry, _ in entries])
        for (entry, tensor), writer in zip(entries, writers):
            if dist.get_rank() not in self._holders(entry):
                continue
            part = self.read(local_name(self.model, entry, self.preset), tensor)
            whole = self._put_together(entry, part, writer)
            if whole is not None:
                if entry.over_vocabulary:
                    whole = whole[: self.preset.vocab_size]
                yield from zip((name for name, _ in entry.sources), entry.layout.split(whole))

    def _holders(self, entry: ParameterMap) -> list[int]:
        """The ranks that hold a weight, or a part of it."""
        if entry.expert is None:
            return list(range(len(self._ranks)))
        per_rank = self.preset.num_experts // self.groups.ep.size()
        return [rank for rank, (_, ep) in enumerate(self._ranks) if ep == entry.expert // per_rank]

    def _put_together(self, entry: ParameterMap, part: torch.Tensor, writer: int) -> torch.Tensor | None:
        """The whole weight on its writer, None elsewhere. Collective over the writer's tensor-parallel ranks."""
        tp, ranks = self.groups.tp, self._ranks[writer][0]
        if tp.size() == 1 or is_expert(entry.megatron) or partition_dim(entry.megatron) is None:
            return part if dist.get_rank() == writer else None
        if dist.get_rank() not in ranks:
            return None
        part = part.contiguous()
        shards = [torch.empty_like(part) for _ in ranks] if dist.get_rank() == writer else None
        dist.gather(part, shards, dst=writer, group=tp)
        return None if shards is None else unshard_parameter(entry.megatron, shards, self.preset)


@torch.no_grad()
def merged(model: torch.nn.Module) -> Read:
    """A `Read` of weights with their low-rank pairs merged in: W + scale B A, rounded once to W's dtype."""
    pairs = {pair.matrix.name: pair for pair in find_pairs(model)}

    @torch.no_grad()
    def read(name: str, tensor: torch.Tensor) -> torch.Tensor:
        pair = pairs.get(name)
        if pair is None:
            return tensor.detach()
        wide = torch.promote_types(tensor.dtype, torch.float32)
        return (tensor.to(wide) + pair.scale * (pair.b.to(wide) @ pair.a.to(wide))).to(tensor.dtype)

    return read
