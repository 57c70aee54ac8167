"""The resolved configuration of a job for other machines: what is shown, and what is refused as at a run's start."""

import re

import pytest

from tools.show_configuration import main

NEEDED = "--prompt-data p.jsonl --tokenizer-path t --train-iters 3"
QWEN = f"--model-preset qwen3.6-27b --bf16 --use-distributed-optimizer --tensor-model-parallel-size 4 {NEEDED}"


def read_values(text: str) -> dict[str, str]:
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines() if line.startswith("  ")]
    return {row[0]: row[1] for row in rows if len(row) == 2}


def test_a_job_of_32_gpus_is_shown_without_any(capsys):
    assert main(f"--ranks 32 {QWEN} --context-parallel-size 4 --sequence-parallel --prompt-chunk-size 8192".split()) == 0
    shown = capsys.readouterr().out
    values = read_values(shown)
    assert values["data parallel"] == "2" and "expert parallel" not in values
    assert values["num_layers"] == "64" and values["prompt_chunk_size"] == "8192" and values["bf16"] == "True"


def test_experts_have_groups_of_their_own(capsys):
    flags = f"--ranks 32 --model-preset glm-5.2 --context-parallel-size 32 --expert-model-parallel-size 32 --bf16 {NEEDED}"
    assert main(flags.split()) == 0
    values = read_values(capsys.readouterr().out)
    assert values["experts a rank"] == "8" and values["expert data parallel"] == "1"


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (f"--ranks 30 {QWEN}", "does not divide the 30 ranks"),
        (f"--ranks 32 --cpu {QWEN}", "--use-distributed-optimizer needs a GPU"),
        ("--ranks 4", "--model-preset is required"),
        (f"--ranks 4 --model-preset tiny-qwen3.6 --no-such-flag {NEEDED}", "--no-such-flag"),
    ],
)
def test_refused_as_at_a_start(capsys, flags, sentence):
    assert main(flags.split()) == 2
    assert sentence in capsys.readouterr().err
