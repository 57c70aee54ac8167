"""Runs of the training program whose weight versions the tests of vLLM take; two ranks at TP 2.

    make_versions.py 2 RENDEZVOUS FOLDER

FOLDER/weights/full and FOLDER/weights/delta are of one run of LoGRA, told twice; lora and merged of one with low-rank pairs.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.ranks.training_ranks import Runner
from tests.support.ranks import fork_ranks

MODEL = "--model-preset tiny-llama --init-method-std 0.06 --train-iters 2 --weight-sync-keep 0"
TP2 = "--context-parallel-size 1 --tensor-model-parallel-size 2"
LOGRA = "--optimizer logra --logra-rank 8 --update-step-size update-ratio --logra-update-ratio 0.1"
PAIRS = "--lora-rank 4 --lora-alpha 64 --lr 1e-2"


def main(rank: int, ranks: int, arguments: list[str]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    runner = Runner(rank, ranks, Path(arguments[0]), "")
    for name, kind, flags in (
        ("full", "full", LOGRA), ("delta", "delta", LOGRA), ("lora", "lora", PAIRS), ("merged", "full", PAIRS),
    ):
        runner.run(name, f"{MODEL} {TP2} {flags} --weight-sync {kind} --weight-sync-dir {runner.folder}/weights/{name}")
    runner.end()


if __name__ == "__main__":
    fork_ranks(main)
