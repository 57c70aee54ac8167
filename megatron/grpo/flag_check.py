"""Whether the program would take command lines, asked by a program that will start it later on (tools/switch_topology.sh).

    python -m megatron.grpo.flag_check < question

The question is one JSON object: `lines`, a name -> {"flags": [...], "ranks": N} for each command line, and `elsewhere`,
true where the runs are for other machines than this one. The answer is the last line of standard output, a JSON object:
name -> sentences, empty where the line would be taken. Nothing is built, and no file that the flags name is read but a
preset's.

Left out: what depends on files (data, tokenizer, checkpoints) and, elsewhere, on what is installed there.
"""

import json
import sys
from collections.abc import Sequence

from longstraw.patches.device import cuda_available
from megatron.grpo.arguments import ArgumentErrors, Machine, parse_arguments


def find_refusals(flags: Sequence[str], ranks: int, *, elsewhere: bool = False) -> list[str]:
    """What the program would say against its flags at a number of ranks, a sentence each; none where it takes them.

    elsewhere: the run is for other machines. Where this one has no GPU, flags pass that machines with GPUs or machines
    without would take, and the sentences are those of machines with GPUs.
    """
    machines = [Machine(cuda=cuda_available(), fused_adam=Machine.here().fused_adam, world_size=ranks)]
    if elsewhere and not cuda_available():
        machines.insert(0, Machine(cuda=True, fused_adam=True, world_size=ranks))
    first: list[str] = []
    for machine in machines:
        try:
            parse_arguments(flags, machine)
            return []
        except ArgumentErrors as errors:
            first = first or errors.sentences
        except SystemExit:
            return ["--help ends the program, and is nothing to run it with"]
    return first


def main() -> int:
    """The program; returns the exit code."""
    question = json.load(sys.stdin)
    answer = {
        name: find_refusals(line["flags"], line["ranks"], elsewhere=question["elsewhere"])
        for name, line in question["lines"].items()
    }
    print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
