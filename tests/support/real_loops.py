"""The loop itself, tools/switch_topology.py over vLLM and Megatron, small: made, watched and killed by a test.

    real_loops.py FOLDER      as a script: makes the model that loops start from
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.ranks import REPOSITORY, run_forked  # noqa: E402
from tests.support.switches import Switch  # noqa: E402

TRAINER = (
    "--model-preset tiny-llama --num-layers 2 --context-parallel-size 2 --reward tests/ranks/sample_reward.py:letters "
    "--reward-workers 1 --group-size 4 --max-response-length 6 --prompt-chunk-size 32 --seed 5"
).split()
ADAM = "--lr 1e-3".split()
LOGRA = "--optimizer logra --logra-rank 8 --update-step-size update-ratio --logra-update-ratio 0.05".split()
ENGINE = "--dtype float32 --max-model-len 128 --kv-cache-gib 1".split()


def make_inputs(folder: Path) -> Path:
    """Everything a loop starts from, in a folder."""
    run_forked(REPOSITORY / "examples/recall/make_data.py", [
        "--output", folder / "data", "--prompt-tokens", 61, "--num-facts", 2, "--num-train", 16, "--num-eval", 2], folder)
    run_forked(Path(__file__), [folder], folder)
    run_forked(REPOSITORY / "tools/convert_checkpoint.py", [
        "--hf-to-megatron", "--load", folder / "hf", "--save", folder / "megatron"], folder)
    return folder


def make_model(folder: Path) -> None:
    """hf/, a Llama of random weights."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder / "data/tokenizer")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=65_536, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    ))
    model.save_pretrained(folder / "hf")
    tokenizer.save_pretrained(folder / "hf")


def trainer_flags(inputs: Path, flags: list[str]) -> list[str]:
    """The flags that trainer and generator get, behind the first `--`."""
    data = [f"--prompt-data={inputs}/data/train.jsonl", f"--tokenizer-path={inputs}/data/tokenizer"]
    return [*TRAINER, *data, f"--pretrained-checkpoint={inputs}/megatron", *flags]


class RealLoop(Switch):
    """See `Switch`. tensor_parallel: the engine's ranks."""

    def __init__(self, folder: Path, inputs: Path, steps: int, *, tensor_parallel: int = 1, sync: str = "full",
                 trainer: list[str] = ADAM, switcher: tuple[str, ...] = ()):
        super().__init__(folder, steps)
        self.steps = steps
        self.command = [
            sys.executable, REPOSITORY / "tools/switch_topology.py", "--run-dir", folder, "--model", inputs / "hf",
            "--train-iters", str(steps), "--nproc-per-node", "2", "--rollout-tensor-parallel-size", str(tensor_parallel),
            "--weight-sync", sync, "--grace-seconds", "30", *switcher, "--", *trainer_flags(inputs, trainer), "--", *ENGINE,
        ]
        self.environment = os.environ | {
            "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1", "PYTHONWARNINGS": "ignore",
        }

    def find(self, role: str, which: str) -> psutil.Process | None:
        """The keeper or the main process of a role, or the first below it whose command line has `which` in it."""
        words = {"trainer": "--rollouts-from", "server": "vllm_server", "generator": "--rollout-only"}[role]
        try:
            for keeper in psutil.Process(self.process.pid).children():
                line = " ".join(keeper.cmdline())
                if "keeper.py" not in line or words not in line:
                    continue
                below = keeper.children(recursive=True)
                if which in ("keeper", "main"):
                    return keeper if which == "keeper" else keeper.children()[0]
                return next(process for process in below if which in " ".join(process.cmdline()))
        except (psutil.NoSuchProcess, IndexError, StopIteration):
            pass
        return None

    def shared_memory(self) -> set[str]:
        """What the switcher has seen of its programs and is still there."""
        return {name for name in self.recorded() if os.path.exists(name)}

    def recorded(self) -> set[str]:
        path = self.folder / f"switch/node-{self.rank}.json"
        return set(json.loads(path.read_text())["shared_memory"]) if path.exists() else set()

    def rollouts(self) -> dict[str, str]:
        """Checksums of the rollouts that have a manifest."""
        paths = [path.with_suffix(".parquet") for path in self.folder.glob("rollouts/step-*.json")]
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}

    def weights(self, version: int, folder: Path | None = None) -> dict[str, str]:
        """Checksums of a version's tensors."""
        manifest = json.loads(((folder or self.folder / "weights") / f"version-{version}/manifest.json").read_text())
        return {name: entry["checksum"] for name, entry in manifest["tensors"].items()}

    def steps_recorded(self) -> list[int]:
        """The steps of metrics.jsonl, in its order."""
        return [json.loads(line)["step"] for line in (self.folder / "train/metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))
