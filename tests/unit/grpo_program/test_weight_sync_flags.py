"""Flags of the weight sync: what does not fit together is refused in a sentence that names the flags."""

import pytest

from megatron.grpo.arguments import ArgumentErrors, parse_arguments

REQUIRED = "--model-preset tiny-llama --prompt-data data.jsonl --tokenizer-path t --train-iters 10"
LOGRA = "--optimizer logra --kl-probe finite-difference"


def refusals(flags):
    with pytest.raises(ArgumentErrors) as caught:
        parse_arguments(f"{REQUIRED} {flags}".split())
    return caught.value.sentences


@pytest.mark.parametrize("kind, flags", [("full", ""), ("full", "--lora-rank 4"), ("lora", "--lora-rank 4"), ("delta", LOGRA)])
def test_every_kind_is_taken_with_what_it_needs(kind, flags):
    _, config = parse_arguments(f"{REQUIRED} {flags} --weight-sync {kind} --weight-sync-dir w".split())
    assert config.weight_sync.weight_sync == kind


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("--weight-sync full", "--weight-sync full needs --weight-sync-dir, where to write"),
        ("--weight-sync-dir w", "--weight-sync-dir w is written only with --weight-sync full, delta or lora"),
        ("--weight-sync delta --weight-sync-dir w", "--weight-sync delta writes the updates of --optimizer logra"),
        (f"{LOGRA} --update-direction dense --weight-sync delta --weight-sync-dir w", "with --update-direction sketch"),
        (f"{LOGRA} --logra-delta-dir d --weight-sync delta --weight-sync-dir w", "leave out --logra-delta-dir"),
        ("--weight-sync lora --weight-sync-dir w", "--weight-sync lora writes the pairs of --lora-rank, which is 0"),
        ("--weight-sync lora --weight-sync-dir w --lora-rank 4 --model-preset tiny-qwen3.6", "use --weight-sync full"),
        ("--weight-sync full --weight-sync-dir w --weight-sync-full-interval 3", "is read only with --weight-sync delta"),
        ("--weight-sync-keep 3", "is read only with --weight-sync full, delta or lora"),
        ("--weight-sync full --weight-sync-dir w --weight-sync-keep -1", "--weight-sync-keep must be at least 0"),
    ],
)
def test_what_does_not_fit_is_refused(flags, sentence):
    assert any(sentence in found for found in refusals(flags)), refusals(flags)
