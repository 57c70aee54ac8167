"""The flags of --optimizer logra: each comes back in the record, and each that nothing would read is refused."""

import dataclasses

import pytest

from longstraw.optim.config import LograConfig
from megatron.grpo.arguments import ArgumentErrors, parse_arguments

BASE = (
    "--model-preset tiny-qwen3.6 --prompt-data data.jsonl --tokenizer-path tok --train-iters 10 --output-dir out "
    "--optimizer logra"
)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def parse(flags: str):
    return parse_arguments(f"{BASE} {flags}".split())


def refuse(flags: str) -> str:
    with pytest.raises(ArgumentErrors) as found:
        parse(flags)
    return str(found.value)


def test_every_field_is_a_flag_and_comes_back():
    """Three command lines, since some fields are read only beside others."""
    lines = [
        "--update-rule sgd --logra-rank 8 --logra-projection gaussian --logra-refresh 3 --logra-seed 5 --logra-cosine-of w "
        "--logra-train-rest --logra-update-ratio 1e-4 --kl-budget 1e-3 --kl-budget-final 1e-4 --kl-budget-steps 7 "
        "--kl-alpha-max 2 --kl-probe finite-difference --kl-probe-scope full --kl-probe-tokens 9 --kl-probe-responses 1 --kl-probe-prompts 2 "
        "--kl-probe-step 0.1 --kl-mismatch-weight 0.2 --kl-budget-floor 0.4 --kl-refused-step stop",
        "--update-direction dense --update-step-size learning-rate --logra-beta2 0.9 --bf16 --logra-masters float32 "
        "--logra-master-residency host",
        "--kl-budget-schedule constant --logra-delta-dir deltas",
    ]
    found, plain = [parse(line)[1].logra for line in lines], LograConfig()
    for field in dataclasses.fields(LograConfig):
        assert any(getattr(record, field.name) != getattr(plain, field.name) for record in found), field.name


def test_adam_reads_none_of_them():
    with pytest.raises(ArgumentErrors) as found:
        parse_arguments(BASE.replace("--optimizer logra", "--logra-rank 8 --kl-budget 1e-3").split())
    assert "--logra-rank 8 is read only with --optimizer logra" in str(found.value)
    assert "--kl-budget 0.001 is read only with --optimizer logra" in str(found.value)


@pytest.mark.parametrize("flags, sentence", [
    ("--update-direction dense --logra-rank 8", "--logra-rank 8 is read only with --optimizer logra with --update-direction"),
    ("--update-rule sgd --logra-beta2 0.9", "--logra-beta2 0.9 is read only with --optimizer logra with --update-rule rowadam"),
    ("--update-step-size update-ratio --kl-budget 1e-3", "--kl-budget 0.001 is read only with"),
    ("--update-step-size learning-rate --logra-update-ratio 1e-3", "--logra-update-ratio 0.001 is read only with"),
    ("--kl-budget-schedule constant --kl-budget-final 1e-5", "--kl-budget-final 1e-05 is read only with"),
    ("--kl-probe-step 0.1", "--kl-probe-step 0.1 is read only with"),
    ("--logra-masters float32", "--logra-masters float32 is read only with --optimizer logra with --bf16"),
    ("--kl-probe-scope full", "use --kl-probe finite-difference with --kl-probe-scope full"),
    ("--logra-delta-dir d --logra-train-rest", "--logra-delta-dir writes what sketches move"),
    ("--update-rule adam", "use rowadam or sgd with --update-direction sketch"),
    ("--update-direction dense --logra-cosine-of w", "it needs --update-direction sketch"),
    ("--lora-rank 4", "--lora-rank 4 freezes the weights that --optimizer logra would move"),
])
def test_what_does_not_fit_together_is_named(flags, sentence):
    assert sentence in refuse(flags)


def test_models_that_forward_mode_does_not_go_through_want_finite_differences():
    line = BASE.replace("tiny-qwen3.6", "tiny-glm5.2")
    assert "--kl-probe jvp does not go through layers that are recomputed" in refuse("--recompute-granularity selective --recompute-modules mlp")
    with pytest.raises(ArgumentErrors, match="--kl-probe jvp does not go through the experts"):
        parse_arguments(line.split())
    assert parse_arguments(f"{line} --kl-probe finite-difference".split())[1].logra.kl_probe == "finite-difference"
    with pytest.raises(ArgumentErrors, match="which --optimizer logra freezes without --logra-train-rest"):
        flags = "--kl-probe finite-difference --dsa-indexer-loss-coeff 0.1 --dsa-indexer-use-sparse-loss"
        parse_arguments(f"{line} {flags}".split())


def test_another_optimizer_is_refused():
    with pytest.raises(ArgumentErrors, match="--optimizer sgd is not supported: use --optimizer adam or logra"):
        parse_arguments(BASE.replace("logra", "sgd").split())
