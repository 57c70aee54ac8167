"""One rank of `test_rollout_mismatch.py`: how far sampler and trainer are apart, and what a run does about it.

    rollout_mismatch_ranks.py 2 RENDEZVOUS FOLDER
"""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from training_ranks import Runner

from longstraw.rollout.store import RolloutStore
from tests.support.ranks import fork_ranks

REPLICAS = "--context-parallel-size 1 --prompts-per-step 3"


def check_mismatch(runner: Runner) -> None:
    """Sampler and trainer agree to rounding at equal weights and temperature, also over replicas; a sampler that does not is
    measured, weighed and masked, and the ratio of the first update stays 1."""
    for name, flags in (("context", ""), ("replicas", REPLICAS)):
        records = runner.run(name, f"{flags} --train-iters 2")
        assert all(record["rollout_log_ratio_max"] < 1e-4 and record["ratio_mean"] == 1.0 for record in records), records
    warm = "--sampling-temperature 0.7 --train-iters 1"
    (record,) = runner.run("warm", f"{warm} --rollout-store {runner.folder}/warm-store --rollout-is token")
    assert record["rollout_log_ratio_max"] < 1e-4 and abs(record["rollout_is_mean"] - 1.0) < 1e-4, record
    (record,) = runner.run("truncated", "--sampling-top-p 0.9 --train-iters 1")
    # the sampler's are of what it drew from, which has at most the whole vocabulary's probability
    assert -0.7 < record["rollout_log_ratio_mean"] < -0.05 and record["ratio_mean"] == 1.0, record

    flags = f"{REPLICAS} --train-iters 1"
    runner.run("shifted-made", f"{flags} --rollout-store {runner.folder}/even-store")
    if runner.rank == 0:
        shift_logprobs(runner.folder / "even-store", runner.folder / "shifted-store", [0.0, 0.25, 0.5, 1.0])
    source = f"--rollouts-from {runner.folder}/shifted-store"
    (plain,) = runner.run("shifted", f"{flags} {source}")
    assert abs(plain["rollout_log_ratio_max"] - 1.0) < 1e-4 and plain["ratio_mean"] == 1.0 and plain["kl"] == 0.0, plain
    (weighed,) = runner.run("weighed", f"{flags} {source} --rollout-is token --rollout-is-cap 1.5")
    assert weighed["ratio_mean"] == 1.0 and weighed["kl"] == 0.0, weighed
    # weights of the four responses of a group: 1, exp(0.25), and twice the cap
    assert weighed["grad_norm"] != plain["grad_norm"] and 1.2 < weighed["rollout_is_mean"] < 1.4, weighed
    assert 0.4 < weighed["rollout_is_capped"] < 0.6, weighed
    (masked,) = runner.run("masked-samples", f"{flags} {source} --rollout-mask-above 0.4")
    assert masked["rollout_masked_fraction"] == 0.5 and abs(masked["rollout_log_ratio_max"] - 0.25) < 1e-4, masked
    (single,) = runner.run("masked-context", f"--prompts-per-step 3 --train-iters 1 {source} --rollout-mask-above 0.4")
    assert abs(single["grad_norm"] - masked["grad_norm"]) <= 1e-4 * masked["grad_norm"], (single, masked)


def shift_logprobs(source: Path, target: Path, shifts: list[float]) -> None:
    """Copy step 1 of a store, with the log-probabilities of each group's i-th response lowered by shifts[i]."""
    store = RolloutStore(source)
    manifest = store.read_manifest(1)
    groups = [
        dataclasses.replace(group, samples=tuple(
            dataclasses.replace(sample, logprobs=tuple(value - shift for value in sample.logprobs))
            for sample, shift in zip(group.samples, shifts)
        ))
        for group in store.read(manifest)
    ]
    RolloutStore(target).write(groups, manifest)


def main(rank: int, ranks: int, arguments: list[str]) -> None:
    """Every scenario."""
    runner = Runner(rank, ranks, Path(arguments[0]))
    check_mismatch(runner)
    runner.end()


if __name__ == "__main__":
    fork_ranks(main)
