"""Rollouts and rewards on disk, a step at a time: train from them without an engine, or look at them with any Parquet reader.

    DIR/step-000003.parquet    one row a response, a prompt's responses in one row group, in the order of the groups
    DIR/step-000003.json       the manifest, written last: a step without one is not there

A prompt's tokens stand in the first row of its group alone: repeated, they would outweigh all responses. Groups that the
group filter left out are kept, with no group_index. A step is replaced whole: its manifest goes first.

    store = RolloutStore(folder)
    store.write(groups, manifest)
    groups = store.read(store.read_manifest(3), rank=0, ranks=2)      # this replica's share

Left out: who may write at a time (`megatron.grpo.initialize.claim_folders`), and files of other writers.
"""

import hashlib
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from longstraw.durable_files import move_whole, sync_path, write_whole
from longstraw.rollout.manifest import StepManifest
from longstraw.rollout.protocol import Sample
from longstraw.rollout.routes import RoutedExperts

SCHEMA = pa.schema([
    ("step", pa.int64()),
    ("weight_version", pa.int64()),
    ("prompt_id", pa.string()),
    ("group_index", pa.int32()),  # place among the step's groups; null where the group filter left the group out
    ("attempt", pa.int32()),  # 0, or which retry of the group filter sampled the group
    ("place", pa.int32()),  # of the prompt in its attempt, over all replicas
    ("sample_id", pa.int32()),  # place of the response in its group
    ("prompt_token_ids", pa.list_(pa.int32())),  # in a group's first row; null in the others
    ("response_token_ids", pa.list_(pa.int32())),
    ("logprobs", pa.list_(pa.float64())),  # the sampler's, of each response token
    ("finish_reason", pa.string()),
    # the experts of each row of the response, null where the sampler did not record them: `longstraw.rollout.routes`
    ("routes", pa.struct([("layers", pa.list_(pa.int32())), ("topk", pa.int32()), ("data", pa.binary())])),
    ("reward", pa.float64()),  # 0 where there is none
    ("reward_status", pa.string()),
    ("reward_message", pa.string()),
    ("kept", pa.bool_()),  # whether the response takes part in its group's statistics and in the loss
])
_NUMBER = "step-{:06d}"
_AT_ONCE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class StoredGroup:
    """One prompt, its responses and their rewards. Lists have one entry a response; see SCHEMA for the rest."""

    prompt_id: str
    prompt_token_ids: array
    """Type "i"."""
    samples: tuple[Sample, ...]
    rewards: tuple[float, ...]
    statuses: tuple[str, ...]
    messages: tuple[str, ...]
    kept: tuple[bool, ...]
    group_index: int | None
    attempt: int
    place: int


class RolloutStore:
    """A folder of steps. Nothing is made or read before it is asked for."""

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)

    def list_steps(self) -> list[int]:
        """Steps that are there whole, ascending."""
        names = [path.stem.removeprefix("step-") for path in self.folder.glob("step-*.json")]
        return sorted(int(name) for name in names if name.isdecimal())

    def write(self, groups: Sequence[StoredGroup], manifest: StepManifest) -> StepManifest:
        """Write a step; returns the manifest with the file's size and checksum.

        Killed at any moment, it leaves the step whole or absent. groups: those of the step in order of their index, then
        those that were left out. Raises OSError, or ValueError where groups and manifest do not fit.
        """
        rows, indices = sum(len(group.samples) for group in groups), [group.group_index for group in groups]
        in_step = [index for index in indices if index is not None]
        if (rows, len(in_step)) != (manifest.rows, manifest.groups) or len(set(in_step)) < len(in_step):
            raise ValueError(
                f"step {manifest.step}: groups {indices} with {rows} rollouts are not the manifest's {manifest.groups} "
                f"groups with {manifest.rows}"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        path, named = self._parquet(manifest.step), self._manifest(manifest.step)
        if named.exists():
            named.unlink()
            sync_path(self.folder)
        partial = path.with_name(path.name + ".partial")
        with pq.ParquetWriter(partial, SCHEMA, compression="zstd") as file:
            for group in groups:
                table = _to_table(group, manifest)
                file.write_table(table, row_group_size=max(1, table.num_rows))
        whole = replace(manifest, bytes=partial.stat().st_size, checksum=_checksum(partial))
        move_whole(partial, path)
        write_whole(named, whole.to_json())
        return whole

    def read_manifest(self, step: int) -> StepManifest:
        """A step's manifest. Raises ValueError, in one sentence, where the step is not there or its manifest does not read."""
        path = self._manifest(step)
        try:
            text = path.read_text()
        except FileNotFoundError:
            raise ValueError(f"{self.folder} holds no rollouts of step {step} ({self._describe_steps()})") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        try:
            manifest = StepManifest.from_json(text)
        except ValueError as error:
            raise ValueError(f"{path} {error}") from None
        if manifest.step != step:
            raise ValueError(f"{path} is the manifest of step {manifest.step}")
        return manifest

    def read(self, manifest: StepManifest, *, rank: int = 0, ranks: int = 1) -> list[StoredGroup]:
        """The share of one of `ranks` replicas: groups whose index leaves the remainder `rank`, in order; rank 0 gets the
        groups that were left out too, behind them. Of the others' rows only the index is decoded.

        Raises ValueError, in one sentence, where the file is missing, damaged or not the one of the manifest.
        """
        path = self._parquet(manifest.step)
        self.verify(manifest)
        try:
            with pq.ParquetFile(path) as file:
                if not file.schema_arrow.equals(SCHEMA):
                    raise ValueError(f"{path} has other columns than rollouts have")
                if file.metadata.num_rows != manifest.rows:
                    raise ValueError(f"{path} holds {file.metadata.num_rows} rollouts, not {manifest.rows}")
                return list(_read_share(file, path, manifest, rank, ranks))
        except (OSError, pa.ArrowException) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None

    def verify(self, manifest: StepManifest) -> None:
        """Raise ValueError, in one sentence, where a step's file is missing or not the one that its manifest is about."""
        path = self._parquet(manifest.step)
        try:
            whole = (path.stat().st_size, _checksum(path)) == (manifest.bytes, manifest.checksum)
        except FileNotFoundError:
            raise ValueError(f"{path} is missing, though its manifest is there") from None
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        if not whole:
            raise ValueError(f"{path} is damaged: it is not the file that was written with its manifest")

    def drop_after(self, step: int) -> None:
        """Remove the steps after `step`, their manifests first."""
        later = [number for number in self.list_steps() if number > step]
        for number in later:
            self._manifest(number).unlink()
        if later:
            sync_path(self.folder)
        for number in later:
            self._parquet(number).unlink(missing_ok=True)

    def _describe_steps(self) -> str:
        steps = self.list_steps()
        return f"it has steps {steps[0]} to {steps[-1]}" if steps else "it has none"

    def _parquet(self, step: int) -> Path:
        return self.folder / f"{_NUMBER.format(step)}.parquet"

    def _manifest(self, step: int) -> Path:
        return self.folder / f"{_NUMBER.format(step)}.json"


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(_AT_ONCE):
            digest.update(part)
    return f"sha256:{digest.hexdigest()}"


def _to_table(group: StoredGroup, manifest: StepManifest) -> pa.Table:
    count = len(group.samples)
    same = {
        "step": manifest.step, "weight_version": manifest.weight_version, "prompt_id": group.prompt_id,
        "group_index": group.group_index, "attempt": group.attempt, "place": group.place,
    }
    prompt = pa.ListArray.from_arrays(pa.array([0, len(group.prompt_token_ids)], pa.int32()), pa.array(
        memoryview(group.prompt_token_ids), pa.int32()))
    nothing = pa.nulls(count - 1, pa.list_(pa.int32()))
    columns = {name: pa.array([value] * count, SCHEMA.field(name).type) for name, value in same.items()} | {
        "sample_id": pa.array(range(count), pa.int32()),
        "prompt_token_ids": pa.concat_arrays([prompt, nothing]),
        "response_token_ids": pa.array([sample.token_ids for sample in group.samples], pa.list_(pa.int32())),
        "logprobs": pa.array([sample.logprobs for sample in group.samples], pa.list_(pa.float64())),
        "finish_reason": pa.array([sample.finish_reason for sample in group.samples], pa.string()),
        "reward": pa.array(group.rewards, pa.float64()),
        "reward_status": pa.array(group.statuses, pa.string()),
        "reward_message": pa.array([_plain_text(message) for message in group.messages], pa.string()),
        "kept": pa.array(group.kept, pa.bool_()),
        "routes": pa.array([_plain_routes(sample.routes) for sample in group.samples], SCHEMA.field("routes").type),
    }
    return pa.table(columns, schema=SCHEMA)


def _plain_text(text: str) -> str:
    """Text that has a UTF-8 form: a lone surrogate, as of bytes that were no text, is written out."""
    return text.encode(errors="backslashreplace").decode()


def _plain_routes(routes: RoutedExperts | None) -> dict | None:
    return None if routes is None else {"layers": list(routes.layers), "topk": routes.topk, "data": routes.data}


def _read_routes(plain: dict | None) -> RoutedExperts | None:
    if plain is None:
        return None
    return RoutedExperts(layers=tuple(plain["layers"]), topk=plain["topk"], data=plain["data"])


def _read_share(file: pq.ParquetFile, path: Path, manifest: StepManifest, rank: int, ranks: int) -> Iterator[StoredGroup]:
    for number in range(file.num_row_groups):
        index = file.read_row_group(number, columns=["group_index"])["group_index"][0].as_py()
        if (0 if index is None else index % ranks) == rank:
            table = file.read_row_group(number)
            for name, wanted in (("step", manifest.step), ("weight_version", manifest.weight_version)):
                if table[name].unique().to_pylist() != [wanted]:
                    raise ValueError(f"{path} holds rollouts of {name} {table[name][0]}, and its manifest says {wanted}")
            yield _to_group(table)


def _to_group(table: pa.Table) -> StoredGroup:
    def column(name: str) -> list:
        return table[name].to_pylist()

    def first(name: str):
        return table[name][0].as_py()

    samples = zip(column("response_token_ids"), column("logprobs"), column("finish_reason"), column("routes"))
    return StoredGroup(
        prompt_id=first("prompt_id"),
        prompt_token_ids=array("i", table["prompt_token_ids"].chunk(0)[0].values.to_numpy()),
        samples=tuple(
            Sample(
                prompt_id=first("prompt_id"), token_ids=tuple(ids), logprobs=tuple(logprobs), finish_reason=reason,
                weight_version=first("weight_version"), routes=_read_routes(routes),
            )
            for ids, logprobs, reason, routes in samples
        ),
        rewards=tuple(column("reward")), statuses=tuple(column("reward_status")),
        messages=tuple(column("reward_message")), kept=tuple(column("kept")),
        group_index=first("group_index"), attempt=first("attempt"), place=first("place"),
    )
