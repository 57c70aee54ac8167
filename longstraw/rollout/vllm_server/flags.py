"""The server's command line: every field is a flag, and its docstring the help.

    python -m longstraw.rollout.vllm_server --model DIR --ready-file PATH --tensor-parallel-size 2

Left out: everything of vLLM that rollouts do not need; `ServerConfig.engine_arguments` says what vLLM gets.
"""

import argparse
import ast
import inspect
import json
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Optional, get_args, get_origin

_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM can be told that adapters have at most."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How the engine runs and where it is reached."""

    model: str
    """Hugging Face folder of the model: config.json and, unless --await-sync, its weights. A folder with a manifest.json
    (an export of the trainer's) is checked tensor by tensor first, and has its weight version."""

    ready_file: str
    """Where to write, once the engine answers, how to reach it: JSON with host, port, token, pid and weight_version,
    readable by its owner alone. It is written whole or not at all, and removed at the end."""

    weight_version: Optional[int] = None
    """Version of the weights in --model where it has no manifest. Default: 0."""

    await_sync: bool = False
    """Start without weights, and refuse to generate until a weight sync has given some."""

    bind_address: str = "127.0.0.1"
    """Address to listen on, and that the engine's own processes meet at: loopback, or the job's own interface."""

    owner_pid: int = 0
    """Process that this one serves: when it is gone, so is the server. Default: nobody."""

    tensor_parallel_size: int = 1
    """Ranks that each layer is cut over."""

    pipeline_parallel_size: int = 1
    """Ranks that the layers are divided among."""

    distributed_executor_backend: Optional[Literal["mp", "ray"]] = None
    """mp: processes of this machine. ray: a running Ray cluster, for several machines (not yet run here). Default: mp where
    there are several ranks."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype that the engine computes in. auto: the one of config.json."""

    max_model_len: Optional[int] = None
    """Tokens of a prompt and its response together, at most. Default: what the model was made for."""

    max_num_seqs: int = 64
    """Responses that are decoded together, at most."""

    max_num_batched_tokens: Optional[int] = None
    """Tokens of one forward pass, at most. Default: vLLM's."""

    kv_cache_gib: float = 1.0
    """On a CPU, GiB of keys and values over all requests, for each rank."""

    gpu_memory_utilization: float = 0.9
    """On a GPU, the share of its memory that weights, keys and values may take (not yet run here)."""

    enforce_eager: bool = False
    """Run without CUDA graphs and compilation. Always so on a CPU."""

    enable_sleep_mode: bool = False
    """On a GPU, let the engine give its memory back between rollouts without ending (not yet run here)."""

    max_lora_rank: int = 0
    """Take low-rank adapters of up to this rank through weight syncs of kind lora. 0: none."""

    start_seconds: float = 1800.0
    """How long the engine may take to load before the server gives up."""

    def __post_init__(self) -> None:
        """Refuse values out of range.

        Raises:
            ValueError: in one sentence that names the flag.
        """
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "max_num_seqs", "max_model_len",
                     "max_num_batched_tokens", "kv_cache_gib", "start_seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {value}.")
        if self.await_sync and self.weight_version is not None:
            raise ValueError("--await-sync starts without weights, so --weight-version says nothing: leave one out.")
        for name in ("weight_version", "owner_pid", "max_lora_rank"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 0, got {getattr(self, name)}.")
        if self.max_lora_rank > _LORA_RANKS[-1]:
            raise ValueError(f"--max-lora-rank must be at most {_LORA_RANKS[-1]}, which vLLM has, got {self.max_lora_rank}.")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(f"--gpu-memory-utilization must lie in (0, 1], got {self.gpu_memory_utilization}.")

    def engine_arguments(self, *, on_cpu: bool) -> dict[str, Any]:
        """Keyword arguments of vllm.EngineArgs."""
        ranks = self.tensor_parallel_size * self.pipeline_parallel_size
        arguments: dict[str, Any] = dict(
            model=self.model, skip_tokenizer_init=True, generation_config="vllm", disable_log_stats=True, seed=0,
            dtype=self.dtype if self.dtype != "auto" else read_dtype(self.model), load_format="dummy" if self.await_sync else "auto",
            tensor_parallel_size=self.tensor_parallel_size, pipeline_parallel_size=self.pipeline_parallel_size,
            distributed_executor_backend=self.distributed_executor_backend or ("mp" if ranks > 1 else None),
            max_num_seqs=self.max_num_seqs, enable_prefix_caching=True, logprobs_mode="processed_logprobs",
            enforce_eager=self.enforce_eager or on_cpu,
            worker_extension_cls="longstraw.rollout.vllm_server.worker.WeightWorker",
            logits_processors=["longstraw.rollout.vllm_server.token_limit:TokenLimit"],
        )
        if self.max_model_len is not None:
            arguments["max_model_len"] = self.max_model_len
        if self.max_num_batched_tokens is not None:
            arguments["max_num_batched_tokens"] = self.max_num_batched_tokens
        if self.max_lora_rank:
            rank = next(rank for rank in _LORA_RANKS if rank >= self.max_lora_rank)
            arguments |= dict(enable_lora=True, max_lora_rank=rank, max_loras=1)
        if not on_cpu:
            arguments |= dict(
                gpu_memory_utilization=self.gpu_memory_utilization, enable_sleep_mode=self.enable_sleep_mode
            )
        return arguments


def read_model_config(model: str) -> dict[str, Any]:
    """A model's config.json. Raises ValueError where the folder has none that reads."""
    try:
        return json.loads((Path(model) / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {model}: config.json does not read: {error}") from None


def check_ranks(config: ServerConfig) -> None:
    """Raise ValueError, naming the flags, where the model cannot be cut over the ranks, as vLLM cuts it.

    A tensor parallel rank has whole attention heads, and whole key and value heads or a copy of one (MLA has no such
    heads); a pipeline parallel rank has at least a layer.
    """
    whole = read_model_config(config.model)
    model, tensor, pipeline = whole.get("text_config", whole), config.tensor_parallel_size, config.pipeline_parallel_size
    heads, kv_heads, layers = (model.get(f"num_{name}") for name in ("attention_heads", "key_value_heads", "hidden_layers"))
    if heads and heads % tensor:
        raise ValueError(f"--tensor-parallel-size {tensor}: it must divide the {heads} attention heads of --model {config.model}")
    if kv_heads and "kv_lora_rank" not in model and kv_heads % tensor and tensor % kv_heads:
        raise ValueError(
            f"--tensor-parallel-size {tensor}: it must divide the {kv_heads} key and value heads of --model {config.model}, "
            "or be a multiple of them"
        )
    if layers and layers < pipeline:
        raise ValueError(f"--pipeline-parallel-size {pipeline}: --model {config.model} has {layers} layers")


def read_dtype(model: str) -> str:
    """The dtype that a model's config.json names; vLLM's own "auto" would compute a float32 model in bfloat16.

    Raises ValueError where the folder has no config.json, or one that names none.
    """
    config = read_model_config(model)
    text = config.get("text_config", config)
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"--model {model}: its config.json names no dtype ({dtype!r}): give --dtype")
    return dtype


def parse_config(argv: list[str] | None = None, *, needs_model: bool = False) -> ServerConfig:
    """The command line as a config; exits with 2 and a sentence where it cannot be run.

    Where the model's folder is there, its sizes are held against the ranks. needs_model: it must be.
    """
    parser = argparse.ArgumentParser(prog="vllm_server", description=__doc__.splitlines()[0], allow_abbrev=False)
    texts = _field_texts()
    for field in fields(ServerConfig):
        flag, required = f"--{field.name.replace('_', '-')}", field.default is MISSING
        if field.type is bool:
            parser.add_argument(flag, action="store_true", help=texts[field.name])
            continue
        kind = next((a for a in get_args(field.type) if a is not type(None)), field.type) if (
            get_origin(field.type) is not Literal
        ) else field.type
        choices = get_args(kind) if get_origin(kind) is Literal else None
        parser.add_argument(
            flag, type=str if choices else kind, choices=choices, required=required,
            default=None if required else field.default, help=texts[field.name].replace("%", "%%"),
        )
    try:
        config = ServerConfig(**vars(parser.parse_args(argv)))
        if needs_model or Path(config.model).exists():
            check_ranks(config)
        return config
    except ValueError as error:
        parser.error(str(error))


def _field_texts() -> dict[str, str]:
    """The docstring under each field."""
    body = ast.parse(inspect.getsource(ServerConfig)).body[0].body
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in zip(body, body[1:])
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
