"""vLLM's engine: what a client's messages make it do, in the one thread that owns it.

A request says which version of the weights must answer; an engine that holds another, or none, refuses. A prompt's
responses are requests of their own, each with its seed; vLLM's prefix cache computes the prompt once.

Left out: the socket (`service`), the weights (`weights`) and several engines behind one server.
"""

import os
from collections.abc import Callable
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from longstraw.rollout.host_copy import Sources
from longstraw.rollout.vllm_server.flags import ServerConfig
from longstraw.rollout.vllm_server.weights import HeldWeights, read_start
from longstraw.rollout.wire import Deadline

_RPC_SECONDS = 120.0


class LateError(TimeoutError):
    """The deadline has passed, or whoever asked is gone."""


class UnfitFlagsError(ValueError):
    """vLLM does not take this model with these flags; the message is vLLM's."""


class Engine:
    """vLLM, loaded. Collective over its workers in every method."""

    def __init__(self, config: ServerConfig):
        """Load the model, with its weights unless --await-sync.

        Raises UnfitFlagsError where vLLM refuses the model with these flags, ValueError where the folder's manifest does
        not fit its tensors, and whatever vLLM raises while it loads.
        """
        self.config, self.on_cpu = config, current_platform.is_cpu()
        version, checksums, lineage = None, {}, None
        if not config.await_sync:
            version, checksums, lineage = read_start(config.model, config.weight_version or 0)
        arguments = config.engine_arguments(on_cpu=self.on_cpu)
        try:
            vllm_config = EngineArgs(**arguments).create_engine_config()
        except ValueError as error:
            raise UnfitFlagsError(str(error)) from error
        if self.on_cpu:
            # vLLM spawns a CPU's workers, for the sake of thread binding, which is off here; forked ones need not import
            # everything again. This process has started no compute thread yet.
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        self.engine = LLMEngine.from_vllm_config(vllm_config, disable_log_stats=True)
        if arguments["distributed_executor_backend"] == "mp":
            self._call("follow_server", os.getpid())
        if self.on_cpu:
            self._call("rewind_discarded_draws")
            if config.pipeline_parallel_size > 1:
                self._call("open_first_step")
        self.weights = HeldWeights(
            self.engine, self._load, dtype=arguments["dtype"], max_lora_rank=config.max_lora_rank, folder=config.model,
            version=version, checksums=checksums, lineage=lineage,
        )
        self._numbered = 0

    def status(self) -> dict[str, Any]:
        """What every answer says of the weights."""
        return self.weights.describe()

    def generate(self, message: dict[str, Any], deadline: Deadline, gone: Callable[[], bool]) -> dict[str, Any]:
        """Answer a message of requests; see `longstraw.rollout.vllm_client.engine`.

        Raises WeightVersionError, ValueError for what vLLM does not take, LateError; nothing runs on then.
        """
        for request in message["requests"]:
            self.weights.require(request["weight_version"])
        places: dict[str, tuple[int, int]] = {}
        internal: list[str] = []
        outputs: list[list[RequestOutput | None]] = []
        try:
            for index, request in enumerate(message["requests"]):
                outputs.append([None] * len(request["seeds"]))
                for place, seed in enumerate(request["seeds"]):
                    self._numbered += 1
                    prompt = TokensPrompt(prompt_token_ids=request["token_ids"])
                    name = str(self._numbered)
                    places[name] = (index, place)
                    own = _sampling(message, seed)
                    internal.append(self.engine.add_request(name, prompt, own, lora_request=self.weights.adapter))
            while self.engine.has_unfinished_requests():
                if deadline.passed or gone():
                    raise LateError(f"not answered within {deadline.seconds:.0f} s" if deadline.passed else "nobody waits")
                for output in self.engine.step():
                    index, place = places[output.request_id]
                    outputs[index][place] = output
        except BaseException as error:
            self.engine.abort_request(internal, internal=True)
            if isinstance(error, VLLMValidationError):
                raise ValueError(str(error)) from None
            raise
        return {
            "groups": [[_describe(output) for output in group] for group in outputs],
            "cached_tokens": [min(output.num_cached_tokens or 0 for output in group) for group in outputs],
        }

    def sync(self, path: str, version: int) -> dict[str, Any]:
        """See `HeldWeights.sync`."""
        return self.weights.sync(path, version)

    def checksums(self) -> dict[str, Any]:
        """See `HeldWeights.checksums`."""
        return {"checksums": self.weights.checksums()}

    def sleep(self, level: int) -> None:
        """Give up the weights (and a GPU's memory, under --enable-sleep-mode) until the next sync."""
        self.weights.drop()
        if not self.on_cpu:
            self.engine.sleep(level)

    def wake(self) -> None:
        """Take the memory back; a sync must follow."""
        if not self.on_cpu:
            self.engine.wake_up()

    def _load(self, sources: Sources) -> dict[str, str]:
        """Have every rank load tensors; returns their checksums."""
        found: dict[str, str] = {}
        for part in self._call("load_tensors", sources, seconds=None):
            found |= part
        return found

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
