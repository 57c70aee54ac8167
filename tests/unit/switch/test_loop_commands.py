"""The loop's flags and commands, what lies on its disk, and the printed plan."""

import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from longstraw.rollout.manifest import StepManifest
from longstraw.rollout.topology.devices import DeviceUse, choose_devices, explain_use, read_devices
from longstraw.rollout.topology.run import Site
from longstraw.rollout.topology.states import Progress
from longstraw.rollout.weight_folder import FolderManifest, version_folder, write_manifest
from megatron.grpo.topology.commands import SERVER_OWNED, TRAINER_OWNED, Commands, check_flags, find_lora_rank
from megatron.grpo.topology.config import SwitchConfig
from megatron.grpo.topology.disk import choose_start, read_progress
from megatron.grpo.topology.trainer_check import ROLES, count_ranks, list_program_flags
from tests.support.ranks import REPOSITORY

TOOL = REPOSITORY / "tools/switch_topology.py"
BASE = dict(run_dir="runs/x", model="hf", train_iters=4)


def run_tool(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, TOOL, *words], capture_output=True, text=True, cwd=REPOSITORY, timeout=300)


@pytest.mark.parametrize("fields, message", [
    ({"run_dir": ""}, "--run-dir must name a folder"), ({"train_iters": 0}, "--train-iters must be at least 1, not 0"),
    ({"node_rank": 1}, "--node-rank 1 numbers none of --num-nodes 1"),
    ({"num_nodes": 2}, "--num-nodes 2 needs --rendezvous"),
    ({"rollout_tensor_parallel_size": 3, "nproc_per_node": 2}, "are 3 ranks, more than the 2 devices"),
    ({"rollout_tensor_parallel_size": 4, "nproc_per_node": 2, "num_nodes": 2, "rendezvous": "a", "rollout_backend": "mp"},
     "--rollout-backend mp runs all 4 ranks of the engine on the first host"),
])
def test_what_cannot_be_run_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        SwitchConfig(**BASE | fields)


def test_ray_is_chosen_where_one_host_has_too_few_devices():
    two = dict(num_nodes=2, nproc_per_node=2, rendezvous="a")
    assert not SwitchConfig(**BASE, **two, rollout_tensor_parallel_size=2).uses_ray
    assert SwitchConfig(**BASE, **two, rollout_tensor_parallel_size=4).uses_ray
    assert SwitchConfig(**BASE, rollout_backend="ray").uses_ray


@pytest.mark.parametrize("words, status, message", [
    (["--run-dir", "x"], 2, "required: --model, --train-iters"),
    (["--run-dir", "x", "--model", "m", "--train-iters", "0"], 2, "--train-iters must be at least 1"),
    (["--run-dir", "x", "--model", "m", "--train-iters", "1", "--", "--save", "y"], 2, "--save among the flags of the trainer"),
    (["--run-dir", "x", "--model", "m", "--train-iters", "1", "--", "--", "--model=y"], 2, "--model among the flags of the engine"),
    (["--run-dir", "x", "--model", "m", "--train-iters", "1", "--", "--", "--"], 2, "a third --"),
    (["--run-dir", "x", "--model", "m", "--train-iters", "1", "--rendezvous", "a:b"], 2, "--rendezvous a:b is neither"),
])
def test_bad_command_lines_are_refused_in_a_sentence(words, status, message):
    shown = run_tool(*words)
    assert shown.returncode == status and message in shown.stderr, shown.stderr


def test_the_plan_of_32_gpus_has_every_command_and_runs_none(tmp_path):
    run = tmp_path / "run"
    shown = run_tool(
        "--plan", "--run-dir", str(run), "--model", "GLM-5.2", "--train-iters", "100", "--nproc-per-node", "8", "--num-nodes", "4",
        "--rendezvous", "node0", "--rollout-tensor-parallel-size", "8", "--rollout-pipeline-parallel-size", "4", "--weight-sync",
        "delta", "--", "--model-preset", "glm-5.2", "--context-parallel-size", "32", "--expert-model-parallel-size", "32",
        "--bf16", "--optimizer", "logra", "--logra-rank", "256", "--kl-probe", "finite-difference", "--prompt-data",
        "prompts.parquet", "--tokenizer-path", "GLM-5.2", "--reward", "math_verify", "--", "--max-model-len", "131072",
    )
    assert shown.returncode == 0, shown.stderr
    assert "warning: --model GLM-5.2 has no config.json here, so it is not checked" in shown.stderr
    lines = [line.strip() for line in shown.stdout.splitlines()]
    assert lines[0].startswith("4 x 8 = 32 devices.")
    order = [line.partition(":")[0] for line in lines if line.partition(":")[0] in (
        "training", "exporting", "draining", "rollout_up", "generating", "rollout_down")]
    assert order == ["rollout_up", "generating", "rollout_down", "training", "exporting", "draining"]
    trainers = [shlex.split(line) for line in lines if "--rollouts-from" in line]
    assert [words[1] for words in trainers] == [f"NODE_RANK={rank}" for rank in range(4)]
    for words in trainers:
        assert words[words.index("--context-parallel-size") + 1] == words[words.index("--expert-model-parallel-size") + 1] == "32"
        assert "MASTER_ADDR=node0" in words and words[words.index("--nproc-per-node") + 1] == "8"
    rays = [line for line in lines if "ray start" in line]
    assert len(rays) == 4 and sum("--head" in line for line in rays) == 1 and sum("--address node0:PORT_1" in line for line in rays) == 3
    server = next(line for line in lines if "vllm_server" in line)
    for words in ("--tensor-parallel-size 8", "--pipeline-parallel-size 4", "--distributed-executor-backend ray", "--max-model-len 131072"):
        assert words in server
    assert not run.exists() and ":10:" not in shown.stdout


def commands(tmp_path: Path, site: Site = Site(), **fields) -> Commands:
    config = SwitchConfig(**BASE | {"run_dir": str(tmp_path), "nproc_per_node": 2} | fields)
    return Commands(
        config=config, site=site, trainer_flags=("--lr", "1e-3"), server_flags=("--dtype", "float32"), grace_seconds=30.0,
        planned=True,
    )


def test_trainer_and_generator_share_the_trainers_flags(tmp_path):
    built = commands(tmp_path)
    trainer, generator = built.build("trainer", 2, (1,)), built.build("generator", 2, ())
    shared = ["--lr", "1e-3", "--train-iters", "4", "--save", f"{tmp_path}/checkpoints", "--load", f"{tmp_path}/checkpoints"]
    for command in (trainer, generator):
        assert " ".join(shared) in " ".join(command.arguments)
    assert " ".join(trainer.arguments).count("--exit-interval 1") == 1 and "NNODES" not in trainer.environment
    assert "--rollout-only" in generator.arguments and f"{tmp_path}/rollouts" in generator.arguments


def test_a_programs_own_flags_are_left_to_the_switcher():
    check_flags(["--lr", "1", "--saver"], TRAINER_OWNED, "trainer")
    with pytest.raises(ValueError, match="--load, --save among the flags of the trainer: the switcher sets them"):
        check_flags(["--save", "a", "--load=b"], TRAINER_OWNED, "trainer")
    with pytest.raises(ValueError, match="--owner-pid among"):
        check_flags(["--owner-pid", "1"], SERVER_OWNED, "engine")


def test_what_the_engine_would_refuse_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "config.json").write_text('{"num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 30}')
    run = ["--run-dir", f"{tmp_path}/run", "--model", str(tmp_path), "--train-iters", "1", "--nproc-per-node", "2"]
    for words, message in (
        (["--rollout-tensor-parallel-size", "2"], "--tensor-parallel-size 2: it must divide the 9 attention heads"),
        (["--", "--lr", "1", "--", "--kv-cache-gib", "0"], "--kv-cache-gib must be above 0"),
    ):
        done = run_tool(*run, *words)
        assert done.returncode == 2 and message in done.stderr and not (tmp_path / "run").exists()


@pytest.mark.parametrize("made", [False, True])
def test_a_model_that_is_not_there_is_refused_at_the_start(made, tmp_path):
    model = tmp_path / "hf"
    if made:
        model.mkdir()
    done = run_tool("--run-dir", f"{tmp_path}/run", "--model", str(model), "--train-iters", "1", "--", "--lr", "1")
    assert done.returncode == 2 and f"--model {model}: config.json does not read" in done.stderr
    assert not (tmp_path / "run").exists()


def test_adapters_reach_an_engine_that_takes_their_rank(tmp_path):
    lora = commands(tmp_path, weight_sync="lora")
    with pytest.raises(ValueError, match="--weight-sync lora sends the pairs of --lora-rank, which is not among"):
        lora.build("server", 1, ())
    words = replace(lora, trainer_flags=("--lora-rank=12", "--lr", "1")).build("server", 1, ()).arguments
    assert words[words.index("--max-lora-rank") + 1] == "12"
    with pytest.raises(ValueError, match="--lora-rank: invalid int value: 'x' among the flags of the trainer"):
        find_lora_rank(["--lora-rank", "x"])
    assert "--max-lora-rank" not in commands(tmp_path).build("server", 1, ()).arguments and "--max-lora-rank" in SERVER_OWNED


def test_the_trainers_flags_are_checked_by_the_trainer_before_anything_starts(tmp_path):
    (tmp_path / "config.json").write_text('{"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}')
    done = run_tool(
        "--run-dir", f"{tmp_path}/run", "--model", str(tmp_path), "--train-iters", "1", "--nproc-per-node", "2", "--",
        "--model-preset", "tiny-llama", "--contxt-parallel-size", "2",
    )
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    last = done.stderr.strip().splitlines()[-1]
    assert last == "switch_topology: error: the trainer refuses its flags: unrecognized arguments: --contxt-parallel-size 2"


def test_each_program_of_the_trainer_is_checked_at_its_own_ranks(tmp_path):
    built = commands(tmp_path, num_nodes=2, rendezvous="a", site=Site(rank=1, count=2))
    assert [count_ranks(built, role) for role in ROLES] == [4, 4, 1]
    trainer, exporter, generator = (list_program_flags(built, role) for role in ROLES)
    assert trainer[:2] == exporter[:2] == generator[:2] == ["--lr", "1e-3"]
    assert "--exit-interval" in trainer and "--weight-sync-only" in exporter and "--rollout-only" in generator


def write_version(weights: Path, version: int, kind: str = "full", base: int | None = None, **fields) -> Path:
    folder = version_folder(weights, version)
    folder.mkdir(parents=True)
    write_manifest(folder, FolderManifest(kind=kind, version=version, base_version=base, **fields))
    return folder


def write_rollouts(rollouts: Path, step: int, version: int) -> None:
    rollouts.mkdir(exist_ok=True)
    (rollouts / f"step-{step:06d}.json").write_text(StepManifest(
        step=step, weight_version=version, source="vllm", settings={}, data_before={}, data_after={}, groups=1, rows=1).to_json())


def test_the_disk_tells_how_far_a_run_is(tmp_path):
    checkpoints, weights, rollouts = (tmp_path / name for name in ("checkpoints", "weights", "rollouts"))

    def read() -> Progress:
        return read_progress(checkpoints, weights, rollouts)

    assert read() == Progress(committed=0, exported=True, rolled_out=False)
    write_rollouts(rollouts, 1, 0)
    assert read().rolled_out
    checkpoints.mkdir()
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("1")
    assert read() == Progress(committed=1, exported=False, rolled_out=False)
    version_folder(weights, 1).mkdir(parents=True)  # being written
    assert not read().exported
    version_folder(weights, 1).rmdir()
    write_version(weights, 1)
    assert read().exported
    write_rollouts(rollouts, 2, 0)
    with pytest.raises(ValueError, match="is of step 2 and weight version 0"):
        read()


def test_an_engine_that_starts_gets_all_weights_and_then_the_updates_on_them(tmp_path):
    weights, model = tmp_path / "weights", tmp_path / "hf"
    assert choose_start(weights, model, 0) == (model, True)
    write_version(weights, 0, full_precision=True)
    folders = {1: write_version(weights, 1, "delta", 0), 2: write_version(weights, 2, full_precision=True),
               3: write_version(weights, 3, "delta", 2), 4: write_version(weights, 4, "unchanged", 3), 5: write_version(weights, 5)}
    assert choose_start(weights, model, 1) == (model, False)
    assert choose_start(weights, model, 4) == (model, False)
    assert choose_start(weights, model, 5) == (folders[5], True)
    folders[3].joinpath("manifest.json").unlink()
    with pytest.raises(ValueError, match="version 4 cannot be had from .*version-3"):
        choose_start(weights, model, 4)
    server = commands(tmp_path, weight_sync_dir=str(weights)).build("server", 2, ()).arguments
    assert "--await-sync" in server and server[server.index("--model") + 1].endswith("hf")
    server = commands(tmp_path, weight_sync_dir=str(weights)).build("server", 6, ()).arguments
    assert "--await-sync" not in server and server[server.index("--model") + 1] == str(folders[5])


def test_a_device_is_empty_when_nobody_computes_and_its_memory_is_back():
    def use(used: int, *processes: int) -> list[DeviceUse]:
        return [DeviceUse(uuid="GPU-1", used_bytes=used, total_bytes=1000, processes=processes)]

    baseline = {"GPU-1": 100}
    assert explain_use(use(110), baseline) == [] and explain_use(use(90), baseline) == []
    assert explain_use(use(111), baseline) == ["GPU-1 holds 11 bytes more than before"]
    assert explain_use(use(100, 7), baseline) == ["GPU-1 is computed on by 7"]


def test_devices_are_read_as_nvidia_smi_prints_them(tmp_path, monkeypatch):
    script = tmp_path / "nvidia-smi"
    script.write_text(
        '#!/bin/sh\necho "$@" >>"$0.calls"\ncase $1 in\n  *memory*) printf "GPU-a, 1, 81559\\nGPU-b, 500, 81559\\n" ;;\n'
        '  *apps*) printf "GPU-b, 41\\nGPU-b, 42\\n" ;;\nesac\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert choose_devices({"CUDA_VISIBLE_DEVICES": "0, 1"}) == ("0", "1") and choose_devices({}) is None
    assert choose_devices({"CUDA_VISIBLE_DEVICES": ""}) == () and read_devices(()) == []
    found = read_devices(("0", "1"))
    assert [(device.uuid, device.used_bytes, device.processes) for device in found] == [
        ("GPU-a", 1 << 20, ()), ("GPU-b", 500 << 20, (41, 42))]
    assert "-i 0,1" in Path(f"{script}.calls").read_text()
    script.write_text("#!/bin/sh\necho broken >&2\nexit 9\n")
    with pytest.raises(RuntimeError, match="nvidia-smi .* failed: broken"):
        read_devices(None)
    script.write_text("#!/bin/sh\necho 'GPU-a, [N/A], 5'\n")
    with pytest.raises(RuntimeError, match="cannot be read"):
        read_devices(None)
