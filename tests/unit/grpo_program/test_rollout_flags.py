"""The flags of rollout sources and of the mismatch: what excludes each other, what nothing would read, what --rollout-only
needs."""

import pytest

from megatron.grpo.arguments import ArgumentErrors, Machine, parse_arguments

BASE = "--model-preset tiny-qwen3.6 --prompt-data data.jsonl --tokenizer-path tok --train-iters 10 --output-dir out"
VLLM = "--rollout-engine vllm --rollout-server ready.json"
ONE = Machine(cuda=False, fused_adam=False, world_size=1)


def refuse(flags: str, machine: Machine = ONE) -> list[str]:
    with pytest.raises(ArgumentErrors) as found:
        parse_arguments(f"{BASE} {flags}".split(), machine)
    return found.value.sentences


@pytest.mark.parametrize("flags, sentence", [
    ("--rollout-engine vllm", "--rollout-engine vllm needs --rollout-server"),
    ("--rollout-server ready.json", "--rollout-server ready.json is read only with --rollout-engine vllm"),
    (f"--rollouts-from d {VLLM}", "--rollouts-from d samples nothing, which --rollout-engine vllm would"),
    ("--rollouts-from d --rollout-store e", "--rollouts-from d samples nothing, which --rollout-store e would"),
    ("--rollouts-from d --rollout-only", "--rollouts-from d samples nothing, which --rollout-only would"),
    ("--rollout-only --rollout-store d", "--rollout-only builds no model to sample from: it needs --rollout-engine vllm"),
    (f"--rollout-only {VLLM}", "--rollout-only needs --rollout-store"),
    ("--rollout-steps 2", "--rollout-steps 2 is read only with --rollout-only"),
    (f"--rollout-only {VLLM} --rollout-store d --rollout-steps 0", "--rollout-steps must be at least 1, not 0"),
    (f"--rollout-only {VLLM} --rollout-store d --weight-sync full --weight-sync-dir w --weight-sync-only --load c",
     "--rollout-only builds no model, whose weights --weight-sync-only would write"),
    ("--rollout-is-cap 3", "--rollout-is-cap 3.0 is read only with --rollout-is token or sequence"),
    ("--rollout-is token --rollout-is-cap 0", "--rollout-is-cap must be finite and above 0, not 0.0"),
    ("--rollout-mask-above nan", "--rollout-mask-above must be finite, not nan"),
    ("--rollout-is token --importance-level sequence", "use --rollout-is sequence"),
])  # fmt: skip
def test_what_does_not_fit_together_is_named(flags, sentence):
    sentences = refuse(flags)
    assert len(sentences) == 1 and sentence in sentences[0] and "\n" not in sentences[0], sentences


def test_rollout_only_takes_the_trainers_flags_in_one_process():
    flags = f"{VLLM} --rollout-store d --rollout-only --tensor-model-parallel-size 2 --context-parallel-size 2"
    args, config = parse_arguments(f"{BASE} {flags}".split(), ONE)
    assert config.rollouts.rollout_only and config.rollouts.rollout_steps == 1 and args.seed == 1234
    (sentence,) = refuse(flags, Machine(cuda=False, fused_adam=False, world_size=8))
    assert sentence == "--rollout-only is one process, not 8 ranks"
    # without it the sizes are held to the ranks that are there
    assert any("does not divide the 1 ranks" in s for s in refuse("--tensor-model-parallel-size 2 --context-parallel-size 2"))
