"""A rollout engine that is a vLLM server process, over its socket.

    with VllmEngine(read_ready_file(path)) as engine:
        groups = engine.generate(requests, group_size=8, sampling=sampling, seed=1, stop_ids=stop_ids)
        engine.sync("weights/version-1", 1)

Every call has a deadline: a server that does not answer in time is an error, and it stops working for a caller that hangs up.

Left out: starting the server (`process`), and sending tensors: a sync names a folder that both sides can read.
"""

import hashlib
import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longstraw.rollout.config import SamplingConfig
from longstraw.rollout.protocol import PromptRequest, Sample, WeightVersionError
from longstraw.rollout.weight_folder import is_same_version, plan_syncs, read_manifest, version_folder
from longstraw.rollout.wire import Deadline, WireError, receive_message, send_message


class EngineError(RuntimeError):
    """The server is gone, too late, or failed at what it was asked."""


@dataclass(frozen=True)
class SyncResult:
    """What a weight sync took: kind as of the folder, bytes read, seconds in the server."""

    kind: str
    weight_version: int
    bytes: int
    seconds: float


def read_ready_file(path: str | Path) -> dict[str, Any]:
    """How to reach a server, as it wrote it. Raises ValueError where the file is missing or is none."""
    try:
        content = json.loads(Path(path).read_text())
        return {name: content[name] for name in ("host", "port", "token", "pid", "weight_version")}
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file: no server is ready there.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no ready file of a rollout server: {error!r}.") from None


class VllmEngine:
    """See `longstraw.rollout.protocol.RolloutEngine`. One thread at a time."""

    def __init__(
        self, ready: dict[str, Any] | str | Path, *, generate_seconds: float = 3600.0, sync_seconds: float = 1800.0,
        call_seconds: float = 60.0,
    ):
        """Connect. ready: a ready file, or its content.

        Raises EngineError where nobody answers or the token is wrong, ValueError for a file that is no ready file.
        """
        ready = ready if isinstance(ready, dict) else read_ready_file(ready)
        self.generate_seconds, self.sync_seconds, self.call_seconds = generate_seconds, sync_seconds, call_seconds
        self.cached_tokens: tuple[int, ...] = ()
        """Of each prompt of the last `generate`, how many tokens were not computed but found in the prefix cache."""

        self._version: int | None = None
        self._builds_on: dict[int, str | None] = {}
        self.port = int(ready["port"])
        try:
            self._connection = socket.create_connection((ready["host"], ready["port"]), timeout=call_seconds)
        except OSError as error:
            raise EngineError(f"no rollout server answers at {ready['host']}:{ready['port']}: {error}") from None
        self._exchange({"token": ready["token"]}, call_seconds)

    def __enter__(self) -> "VllmEngine":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Hang up; the server stays."""
        self._connection.close()

    @property
    def weight_version(self) -> int | None:
        """Of the weights that the server holds, as of its last answer; None where it holds none."""
        return self._version

    @property
    def lineage(self) -> str | None:
        """See `RolloutEngine`."""
        return self._builds_on.get(self._version)

    def generate(
        self, requests: Sequence[PromptRequest], *, group_size: int, sampling: SamplingConfig, seed: int,
        stop_ids: frozenset[int], num_tokens: int | None = None,
    ) -> list[list[Sample]]:
        """See `RolloutEngine`. The samples' log-probabilities are those of the distribution that was sampled from: at the
        temperature, after top-k and top-p.

        Raises WeightVersionError, ValueError for what the server does not take, EngineError.
        """
        answer = self._call("generate", self.generate_seconds, {
            "requests": [
                {
                    "token_ids": list(request.token_ids), "weight_version": request.weight_version,
                    "seeds": [derive_sample_seed(seed, request.prompt_id, place) for place in range(group_size)],
                }
                for request in requests
            ],
            "temperature": sampling.sampling_temperature, "top_p": sampling.sampling_top_p,
            "top_k": sampling.sampling_top_k, "max_response_length": sampling.max_response_length,
            "stop_ids": sorted(stop_ids), "num_tokens": num_tokens,
        })
        self.cached_tokens = tuple(answer["cached_tokens"])
        return [
            [
                Sample(
                    prompt_id=request.prompt_id, token_ids=tuple(one["token_ids"]), logprobs=tuple(one["logprobs"]),
                    finish_reason=one["finish_reason"], weight_version=answer["weight_version"],
                )
                for one in group
            ]
            for request, group in zip(requests, answer["groups"], strict=True)
        ]

    def sync(self, folder: str | Path, version: int) -> SyncResult:
        """Have the server take the weights of a folder that the trainer wrote, which must be of `version`.

        Raises ValueError where the folder is not whole, another's, or arrives damaged; EngineError.
        """
        answer = self._call("sync", self.sync_seconds, {"path": str(Path(folder).resolve()), "version": version})
        return SyncResult(**{name: answer[name] for name in ("kind", "weight_version", "bytes", "seconds")})

    def follow(self, root: str | Path, version: int) -> list[SyncResult]:
        """Bring the server to a version of a trainer's --weight-sync-dir, by as many syncs as that takes, if any.

        Weights of the same number but of another run are replaced. Raises ValueError where that version cannot be had from
        there; and as `sync`.
        """
        held = {number for number, lineage in self._builds_on.items() if is_same_version(root, number, lineage)}
        if self._version == version and (version in held or not version_folder(root, version).exists()):
            return []  # of a version that is not there nothing else is known
        folders = plan_syncs(root, held - {version}, version)
        return [self.sync(folder, read_manifest(folder).version) for folder in folders]

    def checksums(self) -> dict[str, str]:
        """Tensor name -> checksum of the weights that the server loaded, in the names of the Hugging Face checkpoint."""
        return self._call("checksums", self.sync_seconds, {})["checksums"]

    def status(self) -> dict[str, Any]:
        """`state` (what the engine is doing), `weight_version`, `pid`; answered also while the engine works."""
        return self._call("status", self.call_seconds, {})

    def sleep(self, level: int = 2) -> None:
        """Have the server give up its weights, and a GPU's memory under --enable-sleep-mode, until the next sync."""
        self._call("sleep", self.call_seconds, {"level": level})

    def wake(self) -> None:
        """Have the server take the memory back; a sync must follow."""
        self._call("wake", self.call_seconds, {})

    def ask_to_end(self) -> None:
        """Have the server end itself; see `process.stop`, which also waits."""
        self._call("stop", self.call_seconds, {})

    def _call(self, operation: str, seconds: float, content: dict[str, Any]) -> dict[str, Any]:
        return self._exchange({"op": operation, "deadline_seconds": seconds} | content, seconds)

    def _exchange(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a message and wait for its answer; the server's refusals become exceptions."""
        deadline = Deadline(seconds + 5.0)  # the server, which has the same deadline, is to be the one to say so
        try:
            send_message(self._connection, message, deadline)
            answer = receive_message(self._connection, deadline)
        except WireError as error:
            self.close()
            raise EngineError(f"the rollout server: {error}") from None
        if answer is None:
            raise EngineError("the rollout server hung up")
        if "weight_version" in answer:
            lineages = answer.get("lineages", {})
            self._version = answer["weight_version"]
            self._builds_on = {number: lineages.get(str(number)) for number in answer["builds_on"]}
        if answer.get("ok"):
            return answer
        kind, sentence = answer.get("kind"), f"the rollout server: {answer.get('error')}"
        raise {"version": WeightVersionError, "value": ValueError}.get(kind, EngineError)(sentence)


def derive_sample_seed(seed: int, prompt_id: str, place: int) -> int:
    """The seed of one response: a number below 2^63 that its prompt's id and its place in the group fix."""
    digest = hashlib.sha256(json.dumps([seed, prompt_id, place]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
