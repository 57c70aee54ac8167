"""The vLLM server's command line, and what its client says where there is no server. Nothing of vLLM is imported."""

import json

import pytest

from longstraw.rollout.protocol import PromptRequest
from longstraw.rollout.vllm_client import EngineError, VllmEngine, launch_server, wait_until_ready
from longstraw.rollout.vllm_client.engine import derive_sample_seed, read_ready_file
from longstraw.rollout.vllm_client.process import find_vllm_python
from longstraw.rollout.vllm_server.flags import parse_config, read_dtype


def parse(text):
    return parse_config(f"--ready-file r {text}".split())


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float32"}))
    return tmp_path


def test_flags_reach_vllm(model):
    config = parse(f"--model {model} --tensor-parallel-size 8 --pipeline-parallel-size 4 --distributed-executor-backend ray "
                   "--enable-sleep-mode --max-lora-rank 9 --max-model-len 77 --gpu-memory-utilization 0.5")  # fmt: skip
    arguments = config.engine_arguments(on_cpu=False)
    assert (arguments["tensor_parallel_size"], arguments["pipeline_parallel_size"]) == (8, 4)
    assert arguments["distributed_executor_backend"] == "ray" and arguments["enable_sleep_mode"]
    assert (arguments["max_lora_rank"], arguments["max_model_len"], arguments["gpu_memory_utilization"]) == (16, 77, 0.5)
    assert arguments["dtype"] == "float32" and not arguments["enforce_eager"], "vLLM's own auto would take bfloat16"
    plain = parse(f"--model {model}").engine_arguments(on_cpu=True)
    assert plain["enforce_eager"] and plain["skip_tokenizer_init"] and plain["logprobs_mode"] == "processed_logprobs"
    assert plain["load_format"] == "auto" and plain["distributed_executor_backend"] is None
    assert parse(f"--model {model} --await-sync").engine_arguments(on_cpu=True)["load_format"] == "dummy"
    assert parse(f"--model {model} --tensor-parallel-size 2").engine_arguments(on_cpu=True)["distributed_executor_backend"] == "mp"


@pytest.mark.parametrize(
    "text, message",
    [
        ("--model m --tensor-parallel-size 0", "--tensor-parallel-size must be above 0"),
        ("--model m --await-sync --weight-version 3", "--await-sync starts without weights"),
        ("--model m --weight-version -1", "--weight-version must be at least 0"),
        ("--model m --max-lora-rank 513", "--max-lora-rank must be at most 512"),
        ("--model m --gpu-memory-utilization 1.5", "--gpu-memory-utilization must lie in"),
        ("--model m --dtype int8", "invalid choice"),
        ("--model m --tensor-parallel 2", "unrecognized arguments"),
        ("", "--model"),
    ],
)
def test_what_cannot_be_run_is_refused(text, message, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(text)
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_a_server_that_starts_needs_its_model(model, capsys):
    assert parse_config(["--ready-file", "r", "--model", str(model)], needs_model=True).model == str(model)
    with pytest.raises(SystemExit) as caught:
        parse_config(["--ready-file", "r", "--model", f"{model}/none"], needs_model=True)
    assert caught.value.code == 2 and "none: config.json does not read" in capsys.readouterr().err


SIZES = {"dtype": "float32", "num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 30}


@pytest.mark.parametrize("sizes, flags, message", [
    ({}, "--tensor-parallel-size 2", "--tensor-parallel-size 2: it must divide the 9 attention heads of --model"),
    ({"num_attention_heads": 18}, "--tensor-parallel-size 2", "must divide the 3 key and value heads"),
    ({}, "--pipeline-parallel-size 31", "--pipeline-parallel-size 31: --model"),
    ({}, "--tensor-parallel-size 3 --pipeline-parallel-size 30", ""),
    ({}, "--tensor-parallel-size 9", ""),  # each key and value head on three ranks
    ({"num_attention_heads": 8, "kv_lora_rank": 512}, "--tensor-parallel-size 8", ""),  # one latent, on every rank
])
@pytest.mark.parametrize("nested", [False, True])
def test_ranks_that_the_model_cannot_be_cut_over_are_refused(model, sizes, flags, message, nested, capsys):
    content = SIZES | sizes
    (model / "config.json").write_text(json.dumps({"text_config": content} if nested else content))
    if not message:
        assert parse(f"--model {model} {flags}").model == str(model)
        return
    with pytest.raises(SystemExit) as caught:
        parse(f"--model {model} {flags}")
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_every_flag_has_its_help(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    assert "not yet run here" in capsys.readouterr().out


def test_a_dtype_is_read_from_config_json(model):
    for content, wanted in (
        ({"torch_dtype": "bfloat16"}, "bfloat16"), ({"text_config": {"dtype": "bfloat16"}, "dtype": "float32"}, "bfloat16"),
        ({"text_config": {}, "torch_dtype": "float32"}, "float32"),
    ):
        (model / "config.json").write_text(json.dumps(content))
        assert read_dtype(str(model)) == wanted
    (model / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="names no dtype"):
        read_dtype(str(model))
    with pytest.raises(ValueError, match="config.json does not read"):
        read_dtype(str(model / "nowhere"))


def test_seeds_differ_by_run_prompt_and_place():
    seeds = {derive_sample_seed(s, p, n) for s in (0, 1) for p in ("a", "b") for n in (0, 1)}
    assert len(seeds) == 8 and all(0 <= seed < 2**63 for seed in seeds)
    assert derive_sample_seed(0, "a", 0) == derive_sample_seed(0, "a", 0)
    assert PromptRequest(prompt_id="a", token_ids=(1,), weight_version=0).weight_version == 0


def test_no_server_and_no_environment_are_said(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no server is ready there"):
        read_ready_file(tmp_path / "ready.json")
    (tmp_path / "ready.json").write_text("{}")
    with pytest.raises(ValueError, match="is no ready file"):
        read_ready_file(tmp_path / "ready.json")
    with pytest.raises(EngineError, match="no rollout server answers at 127.0.0.1:1:"):
        VllmEngine({"host": "127.0.0.1", "port": 1, "token": ""})
    monkeypatch.setenv("LONGSTRAW_VLLM_VENV", str(tmp_path))
    with pytest.raises(ValueError, match="make one with tools/setup_vllm.sh"):
        find_vllm_python()


def test_a_server_that_does_not_start_is_reported_with_its_last_words(tmp_path, monkeypatch):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho last words; exit 3\n")
    python.chmod(0o755)
    monkeypatch.setenv("LONGSTRAW_VLLM_VENV", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"(?s)ended with exit code 3.*last words"):
        wait_until_ready(launch_server(["--model", "m"], folder=tmp_path / "run"), seconds=20)
    python.write_text("#!/bin/sh\nsleep 100\n")
    server = launch_server(["--model", "m"], folder=tmp_path / "run")
    with pytest.raises(RuntimeError, match="is not ready after 0 s"):
        wait_until_ready(server, seconds=0.1)
    assert server.process.poll() is not None
