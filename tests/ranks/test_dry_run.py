"""A dry run's memory against the measured memory of the same step: every phase, by category."""

import json
from pathlib import Path

import pytest

from tests.support.ranks import run_forked

pytestmark = [pytest.mark.ranks(seconds=120), pytest.mark.timeout(900)]

HERE = Path(__file__).parent
SMALL = "--prompt-length 150 --response-length 20 --group-size 3 --prompt-chunk-size 32 --response-block-size 8"
LOGRA = "--optimizer logra --logra-rank 8"
HOST = "--page-residency host --adjoint-residency host --attention-output-residency host"
PROBE = "--kl-probe finite-difference"
SKIPPED = {"build"}
"""A dry run draws no weights, so it lacks what drawing them takes for a moment."""

GLM = "--model-preset tiny-glm5.2 --selection-residency host"

CASES = {
    "llama, adam": (1, f"--model-preset tiny-llama {SMALL}"),
    "llama, response_only, cp 2": (2, f"--model-preset tiny-llama --semantics response_only {SMALL}"),
    "llama, lora": (1, f"--model-preset tiny-llama --lora-rank 4 {SMALL}"),
    "hybrid, logra": (1, f"--model-preset tiny-qwen3.6 {LOGRA} {SMALL} {HOST}"),
    "hybrid, adam, kl, cp 2": (2, f"--model-preset tiny-qwen3.6 --kl-coefficient 0.1 {SMALL}"),
    "hybrid, logra, bf16, cp 2, graphs of two chunks kept": (2, f"--model-preset tiny-qwen3.6 --bf16 {LOGRA} {SMALL} {HOST} --live-chunks 2 --recurrent-state-residency host"),
    "glm, logra": (1, f"{GLM} {LOGRA} {PROBE} {SMALL}"),
    "glm, adam, response_only, cp 2, ep 2": (
        2, f"{GLM} --expert-model-parallel-size 2 --semantics response_only {SMALL} --page-residency host"
    ),
}


def run_both(tmp_path, ranks: int, flags: str, *more: str) -> tuple[dict, dict]:
    """(measured, dry) reports."""
    parts, paths = flags.split(), [tmp_path / "measured.json", tmp_path / "dry.json"]
    parts += ["--context-parallel-size", str(ranks)]
    measure = ["measure", ranks, tmp_path / "rendezvous", paths[0], *parts]
    run_forked(HERE / "dry_run_ranks.py", measure, tmp_path, seconds=400)
    run_forked(HERE / "dry_run_ranks.py", ["dry", paths[1], *parts, *more], tmp_path, seconds=400)
    return tuple(json.loads(path.read_text()) for path in paths)


def differences(measured: dict, dry: dict) -> list[str]:
    """Each peak that is off by more than 2 %, and each category that is off by more than 2 % of its phase's peak."""
    found = []
    for phase, places in measured["phases"].items():
        for place, peak in places.items():
            other = dry["phases"][phase][place]
            pairs = {"peak": (peak["bytes"], other["bytes"])}
            for name in {*peak["categories"], *other["categories"]}:
                pairs[name] = peak["categories"].get(name, 0), other["categories"].get(name, 0)
            for name, (real, predicted) in pairs.items():
                if phase not in SKIPPED and abs(real - predicted) > 0.02 * max(peak["bytes"], 1):
                    found.append(f"{phase}, {place}, {name}: {real} measured, {predicted} in the dry run")
    return found


@pytest.mark.parametrize("case", CASES)
def test_every_phase_and_category_is_within_2_percent(case, tmp_path):
    measured, dry = run_both(tmp_path, *CASES[case])
    assert set(measured["phases"]) == set(dry["phases"])
    assert differences(measured, dry) == []
    for place in ("device", "host"):
        assert dry["peak_bytes"][place] == pytest.approx(measured["peak_bytes"][place], rel=0.02)
