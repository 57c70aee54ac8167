"""vLLM's engine and the version of the weights that it holds.

Everything here runs in one thread. A request says which version must answer; an engine that holds another, or none, refuses.
From the moment a sync begins to touch the weights until it is complete, the engine holds none.

Left out: the socket (`service`) and several engines behind one server.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from longstraw.rollout.protocol import WeightVersionError
from longstraw.rollout.vllm_server.flags import ServerConfig
from longstraw.rollout.weight_folder import MANIFEST, check_files, compare_checksums, read_manifest, tensor_files
from longstraw.rollout.wire import Deadline

_RPC_SECONDS = 120.0


class LateError(TimeoutError):
    """The deadline has passed, or whoever asked is gone."""


class Engine:
    """vLLM, loaded. Collective over its workers in every method."""

    def __init__(self, config: ServerConfig):
        """Load the model, with its weights unless --await-sync.

        Raises ValueError where the folder's manifest does not fit its tensors, and whatever vLLM raises.
        """
        self.config, self.on_cpu = config, current_platform.is_cpu()
        self.version: int | None = None
        self.checksums: dict[str, str] = {}
        version = config.weight_version or 0
        if not config.await_sync:
            if (Path(config.model) / MANIFEST).exists():
                manifest = read_manifest(config.model)
                check_files(config.model, manifest)
                version = manifest.version
                self.checksums = {name: entry.checksum for name, entry in manifest.tensors.items()}
        arguments = config.engine_arguments(on_cpu=self.on_cpu)
        vllm_config = EngineArgs(**arguments).create_engine_config()
        if self.on_cpu:
            # vLLM spawns a CPU's workers, for the sake of thread binding, which is off here; forked ones need not import
            # everything again. This process has started no compute thread yet.
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        self.engine = LLMEngine.from_vllm_config(vllm_config, disable_log_stats=True)
        if arguments["distributed_executor_backend"] == "mp":
            self._call("follow_server", os.getpid())
        if config.pipeline_parallel_size > 1:
            self._call("open_first_step")
        if not config.await_sync:
            self.version = version
        self._numbered = 0

    def generate(self, message: dict[str, Any], deadline: Deadline, gone: Callable[[], bool]) -> dict[str, Any]:
        """Answer a message of requests; see `longstraw.rollout.vllm_client.engine`.

        Raises WeightVersionError, ValueError for what vLLM does not take, LateError; nothing runs on then.
        """
        for request in message["requests"]:
            self._require(request["weight_version"])
        numbers: dict[str, tuple[int, int]] = {}
        outputs: list[list[RequestOutput | None]] = []
        try:
            for index, request in enumerate(message["requests"]):
                outputs.append([None] * len(request["seeds"]))
                for place, seed in enumerate(request["seeds"]):
                    self._numbered += 1
                    prompt = TokensPrompt(prompt_token_ids=request["token_ids"])
                    number = self.engine.add_request(str(self._numbered), prompt, _sampling(message, seed))
                    numbers[number] = numbers[str(self._numbered)] = (index, place)
            while self.engine.has_unfinished_requests():
                if deadline.passed or gone():
                    raise LateError(f"not answered within {deadline.seconds:.0f} s" if deadline.passed else "nobody waits")
                for output in self.engine.step():
                    index, place = numbers[output.request_id]
                    outputs[index][place] = output
        except BaseException:
            self.engine.abort_request([n for n in numbers if "-" in n] or list(numbers), internal=True)
            raise
        return {
            "groups": [[_describe(output) for output in group] for group in outputs],
            "cached_tokens": [min(output.num_cached_tokens or 0 for output in group) for group in outputs],
            "weight_version": self.version,
        }

    def sync(self, path: str, version: int) -> dict[str, Any]:
        """Take the weights of a folder that the trainer wrote; returns bytes and seconds.

        version: that the folder must hold. Raises ValueError: the folder is not whole or another's (nothing has changed), or
        a tensor arrived with other bits than were written (the engine holds no weights then).
        """
        started = time.perf_counter()
        manifest = read_manifest(path)
        if manifest.version != version:
            raise ValueError(f"{path} holds version {manifest.version}, not {version}")
        if manifest.kind != "full":
            raise ValueError(f"{path} is of kind {manifest.kind}, which this engine does not take")
        files = sorted({str(file) for file in tensor_files(path).values()})
        self.version, self.checksums = None, {}
        found = self._load(files)
        compare_checksums({name: entry.checksum for name, entry in manifest.tensors.items()}, found, str(path))
        self.version, self.checksums = version, found
        return {
            "kind": manifest.kind, "weight_version": version, "bytes": manifest.payload_bytes,
            "seconds": time.perf_counter() - started,
        }

    def sleep(self, level: int) -> None:
        """Give up the weights (and a GPU's memory, under --enable-sleep-mode) until the next sync."""
        self.version = None
        self.checksums = {}
        if not self.on_cpu:
            self.engine.sleep(level)

    def wake(self) -> None:
        """Take the memory back; a sync must follow."""
        if not self.on_cpu:
            self.engine.wake_up()

    def _load(self, files: list[str]) -> dict[str, str]:
        """Load safetensors files into every rank and forget cached prefixes; returns the checksums of what arrived."""
        found: dict[str, str] = {}
        for part in self._call("load_tensors", files, seconds=None):
            found |= part
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not clear its prefix cache")
        return found

    def _require(self, version: int) -> None:
        if self.version is None:
            raise WeightVersionError("the engine holds no weights: a weight sync must complete first")
        if version != self.version:
            raise WeightVersionError(f"the engine holds weights of version {self.version}, not {version}")

    def _call(self, method: str, *arguments, seconds: float | None = _RPC_SECONDS) -> list:
        return self.engine.collective_rpc(method, seconds, arguments)


def _sampling(message: dict[str, Any], seed: int) -> SamplingParams:
    limit = message["num_tokens"]
    return SamplingParams(
        temperature=message["temperature"], top_p=message["top_p"], top_k=message["top_k"],
        max_tokens=message["max_response_length"], stop_token_ids=message["stop_ids"], seed=seed, logprobs=0,
        ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args=None if limit is None else {"num_tokens": limit},
    )


def _describe(output: RequestOutput) -> dict[str, Any]:
    """A response as the client gets it. Raises RuntimeError where vLLM ended it otherwise than by stop or length."""
    completion = output.outputs[0]
    if completion.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a response with {completion.finish_reason!r}")
    return {
        "token_ids": list(completion.token_ids), "finish_reason": completion.finish_reason,
        "logprobs": [entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs)],
    }
