"""A receipt's settings: every flag that makes another computation of a run changes one of them, and is named in a comparison."""

import json

import pytest

from megatron.grpo.arguments import parse_arguments
from megatron.grpo.receipt_settings import describe_objective, describe_responses, describe_update

BASE = "--model-preset tiny-qwen3.6 --prompt-data data.jsonl --tokenizer-path tok --train-iters 10 --output-dir out"
LOGRA = "--optimizer logra --logra-rank 8"


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def describe(flags: str) -> dict[str, dict]:
    args, config = parse_arguments(f"{BASE} {flags}".split())
    parts = {
        "objective": describe_objective(args, config), "update": describe_update(args, config), "rollout": describe_responses(config),
    }
    assert json.loads(json.dumps(parts)) == parts
    assert all(value is None or isinstance(value, (bool, int, float, str)) for part in parts.values() for value in part.values())
    return parts


@pytest.mark.parametrize("flags, change, place", [
    ("", "--lr 1e-2", "update.lr"),
    ("", "--weight-decay 0.5", "update.weight_decay"),
    ("", "--clip-grad 100", "update.clip_grad"),
    ("", "--adam-beta1 0.5", "update.adam_beta1"),
    ("", "--adam-eps 1e-6", "update.adam_eps"),
    ("", "--lr-warmup-iters 3", "update.lr_warmup_iters"),
    ("", "--lr-decay-style cosine", "update.lr_decay_style"),
    ("--lora-rank 4", "--lora-alpha 512", "update.lora_alpha"),
    ("", "--lora-rank 4", "update.lora_rank"),
    (LOGRA, "--kl-budget 1e-3", "update.kl_budget"),
    (f"{LOGRA} --logra-train-rest", "--lr 1e-2", "update.lr"),
    ("", "--sampling-temperature 3.0", "rollout.sampling_temperature"),
    ("", "--sampling-top-p 0.5", "rollout.sampling_top_p"),
    ("", "--max-response-length 3", "rollout.max_response_length"),
    ("", "--rollout-is token", "rollout.rollout_is"),
    ("", "--rollout-mask-above 0.5", "rollout.rollout_mask_above"),
    ("", "--reward math_verify", "rollout.rewards"),
    ("--reward math_verify exact_match --reward-weights 1 1", "--reward-weights 1 2", "rollout.rewards"),
    ("", "--reward-failure stop", "rollout.reward_failure"),
    ("", "--mask-truncated", "objective.mask_truncated"),
    ("", "--clip-range-low 0.1", "objective.clip_range_low"),
])
def test_a_setting_of_the_computation_is_in_the_receipt(flags, change, place):
    before, after = describe(flags), describe(f"{flags} {change}")
    part, name = place.split(".")
    assert before[part].get(name) != after[part][name]


def test_rates_that_nothing_reads_are_left_out():
    assert "lr" in describe("")["update"] and "lr" not in describe(LOGRA)["update"]
    assert "lora_alpha" not in describe("")["update"]
