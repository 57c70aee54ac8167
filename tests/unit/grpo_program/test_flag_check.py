"""What the switcher asks before it starts anything: would the training program take these flags?"""

import io
import json

import pytest

from megatron.grpo import flag_check
from megatron.grpo.flag_check import find_refusals

TINY = "--model-preset tiny-llama --prompt-data p.jsonl --tokenizer-path t --train-iters 2"


@pytest.mark.parametrize("flags, ranks, sentence", [
    (f"{TINY} --contxt-parallel-size 2", 2, "unrecognized arguments: --contxt-parallel-size 2"),
    (TINY.replace("tiny-llama", "nonexist"), 1, "nonexist"),
    (f"{TINY} --weight-sync lora --weight-sync-dir w", 1, "--weight-sync lora writes the pairs of --lora-rank, which is 0"),
    (f"{TINY} --tensor-model-parallel-size 2 --context-parallel-size 2", 6, "--context-parallel-size 2"),
    (f"{TINY} --help", 1, "--help ends the program"),
    (f"{TINY} --use-distributed-optimizer", 1, "--use-distributed-optimizer needs a GPU"),
])
def test_what_the_program_refuses_is_said(flags, ranks, sentence):
    found = find_refusals(flags.split(), ranks)
    assert any(sentence in one for one in found), found


def test_what_it_takes_is_taken():
    assert find_refusals(f"{TINY} --context-parallel-size 2".split(), 4) == []
    only = f"{TINY} --context-parallel-size 2 --rollout-only --rollout-engine vllm --rollout-server r --rollout-store s"
    assert find_refusals(only.split(), 1) == []


def test_a_plan_for_other_machines_takes_what_needs_their_gpus():
    flags = f"{TINY} --use-distributed-optimizer --distributed-backend nccl"
    assert find_refusals(flags.split(), 2, elsewhere=True) == []
    assert find_refusals(f"{TINY} --distributed-backend gloo".split(), 2, elsewhere=True) == []
    assert "--contxt" in find_refusals(f"{flags} --contxt 2".split(), 2, elsewhere=True)[0]


def test_every_line_of_a_question_is_answered(monkeypatch, capsys):
    lines = {"good": {"flags": TINY.split(), "ranks": 1}, "bad": {"flags": [*TINY.split(), "--lorank", "1"], "ranks": 1}}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({"lines": lines, "elsewhere": False})))
    assert flag_check.main() == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer == {"good": [], "bad": ["unrecognized arguments: --lorank 1"]}
